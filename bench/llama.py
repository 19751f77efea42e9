"""Engines with the caches of a Llama of 80 layers and 8 KV heads of 128 elements in bfloat16, blocks of 16 tokens."""

from __future__ import annotations

from msgspec.structs import replace

from bench.transfer_shapes import FACTS
from kvferry.cli.plan.short_engine import engine_of_form
from kvferry.cli.plan.short_form import form_of, pairs_of
from kvferry.protocol.description_json import from_engine_json
from kvferry.protocol.handshake import EngineDescription

LAYERS = 80
BLOCK_TOKENS = 16


def llama(
    engine_id: str, *, tp: int, layout: str, blocks: int, layers: int = LAYERS
) -> EngineDescription:
    """The engine.

    Args:
        tp: tensor-parallel ranks, a divisor of 8.
        layout: `HND` or `NHD`: heads or tokens outermost in a block; K and V of a token packed.
        layers: other than the Llama's.
    """
    sizes = f"tp={tp},layout={layout},block={BLOCK_TOKENS},blocks={blocks}"
    form = form_of(pairs_of(f"layers={layers},heads=8,dim=128,{sizes}"))
    engine = from_engine_json(engine_of_form(form, engine_id))
    workers = [
        replace(worker, agent=f"{engine_id}{rank}", memory="DRAM")
        for rank, worker in enumerate(engine.workers)
    ]
    return replace(engine, facts=FACTS, workers=tuple(workers))
