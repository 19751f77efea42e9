"""Engines with the caches of a Llama of 80 layers and 8 KV heads of 128 elements in bfloat16, blocks of 16 tokens."""

from __future__ import annotations

from bench.transfer_shapes import FACTS
from kvferry.protocol.geometry import Format, PagedTensor, Place, Range, Topology
from kvferry.protocol.handshake import (
    CacheGroup,
    EngineDescription,
    LeaseTableAddress,
    WorkerDescription,
)

LAYERS, HEADS, BLOCK_TOKENS = 80, 8, 16
HALF_BYTES = 256
"""K, or V, of one head and token."""
TOKEN_BYTES = 2 * HALF_BYTES


def llama(
    engine_id: str, *, tp: int, layout: str, blocks: int, layers: int = LAYERS
) -> EngineDescription:
    """The engine.

    Args:
        tp: tensor-parallel ranks, a divisor of 8.
        layout: `HND` or `NHD`: heads or tokens outermost in a block; K and V of a token packed.
        layers: other than the Llama's.
    """
    workers = []
    for rank in range(tp):
        heads = Range(rank * HEADS // tp, (rank + 1) * HEADS // tp)
        workers.append(
            WorkerDescription(
                place=Place(tp=rank),
                agent=f"{engine_id}{rank}",
                agent_metadata=b"-",
                memory="DRAM",
                device=0,
                lease_table=LeaseTableAddress(address=0, slots=1),
                tensors=_tensors(heads, layout, blocks, (rank + 1) << 44, layers),
            )
        )
    return EngineDescription(
        engine_id=engine_id,
        boot="0" * 32,
        mac_key=bytes(32),
        facts=FACTS,
        topology=Topology(tp=tp),
        groups=(CacheGroup(policy="full", block_tokens=BLOCK_TOKENS),),
        workers=tuple(workers),
    )


def _tensors(
    heads: Range, layout: str, blocks: int, base: int, layers: int
) -> tuple[PagedTensor, ...]:
    held = len(heads)
    head_stride, tile_stride = (
        (BLOCK_TOKENS * TOKEN_BYTES, TOKEN_BYTES)
        if layout == "HND"
        else (TOKEN_BYTES, held * TOKEN_BYTES)
    )
    block_stride = held * BLOCK_TOKENS * TOKEN_BYTES
    return tuple(
        PagedTensor(
            layer=f"model.layers.{layer}.self_attn.attn",
            kind=kind,
            group=0,
            base=base + layer * blocks * block_stride + offset,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            block_stride=block_stride,
            heads=heads,
            head_stride=head_stride,
            tile_tokens=1,
            tile_stride=tile_stride,
            cell_bytes=HALF_BYTES,
            format=Format(dtype="bfloat16"),
        )
        for layer in range(layers)
        for kind, offset in (("k", 0), ("v", HALF_BYTES))
    )
