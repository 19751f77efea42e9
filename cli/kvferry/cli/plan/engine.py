"""One engine as it is displayed: its summary, and its texts in tables and pictures."""

from __future__ import annotations

import msgspec

from kvferry.plan.engine_shape import EngineShape, layer_order
from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, WorkerDescription


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part that one worker holds: layers and heads as half-open ranges over the model, and the tokens."""

    place: Place
    layers: Range
    heads: Range
    interleave: Interleave
    cache_bytes: int


class PlanSide(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    engine_id: str
    topology: Topology
    layers: int
    heads: int
    dtypes: tuple[str, ...]
    groups: tuple[CacheGroup, ...]
    workers: tuple[Shard, ...]


def side_of(engine: EngineDescription) -> PlanSide:
    """One engine, as it is displayed."""
    shape = EngineShape.of(engine)
    order = layer_order(engine)
    return PlanSide(
        engine_id=engine.engine_id,
        topology=shape.topology,
        layers=shape.layers,
        heads=shape.heads,
        dtypes=shape.dtypes,
        groups=shape.groups,
        workers=tuple(_shard(engine, worker, order) for worker in engine.workers),
    )


def _shard(engine: EngineDescription, worker: WorkerDescription, order: dict[str, int]) -> Shard:
    held = [tensor for tensor in worker.tensors if len(tensor.heads)]
    layers = [order[tensor.layer] for tensor in held]
    attention = [tensor for tensor in held if engine.groups[tensor.group].policy != "state"]
    shown = attention or [tensor for tensor in held if not tensor.kind.startswith("conv")] or held
    return Shard(
        place=worker.place,
        layers=Range(min(layers, default=0), max(layers, default=-1) + 1),
        heads=shown[0].heads if shown else Range(0, 0),
        interleave=shown[0].interleave if shown else Interleave(),
        cache_bytes=sum(tensor.blocks * tensor.block_bytes for tensor in held),
    )


def format_engine(side: PlanSide) -> str:
    """An engine in one line."""
    return str(EngineShape(side.topology, side.layers, side.heads, side.dtypes, side.groups))


def format_tokens(interleave: Interleave) -> str:
    """The tokens that a worker holds: `all`, or `rank 1 of 2, 16 in a row`."""
    if interleave.ranks == 1:
        return "all"
    return f"rank {interleave.rank} of {interleave.ranks}, {interleave.run_tokens} in a row"
