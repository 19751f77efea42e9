"""One engine as it is displayed: its summary, and its texts in tables and pictures."""

from __future__ import annotations

import re

import msgspec

from kvferry.cli.formatting import counted
from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, WorkerDescription


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part that one worker holds: layers and heads as half-open ranges over the model, and the tokens."""

    place: Place
    layers: Range
    heads: Range
    interleave: Interleave
    cache_bytes: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    engine_id: str
    topology: Topology
    layers: int
    heads: int
    dtypes: tuple[str, ...]
    groups: tuple[CacheGroup, ...]
    workers: tuple[Shard, ...]


def side_of(engine: EngineDescription) -> Side:
    """One engine, as it is displayed."""
    tensors = [tensor for worker in engine.workers for tensor in worker.tensors]
    order = layer_order(engine)
    shards = tuple(_shard(engine, worker, order) for worker in engine.workers)
    return Side(
        engine_id=engine.engine_id,
        topology=engine.topology,
        layers=len(order),
        heads=max((shard.heads.stop for shard in shards), default=0),
        dtypes=tuple(sorted({tensor.format.dtype for tensor in tensors})),
        groups=engine.groups,
        workers=shards,
    )


def layer_order(engine: EngineDescription) -> dict[str, int]:
    """The index of every layer name among all layers of the engine."""
    names = {tensor.layer for worker in engine.workers for tensor in worker.tensors}
    return {name: index for index, name in enumerate(sorted(names, key=natural))}


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that sorts `layers.2` before `layers.10`."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))


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


def sizes(side: Side) -> str:
    """`TP 4 · PP 2`: the tensor-parallel size, and the other parallel sizes above 1."""
    topology = side.topology
    named = (("PP", topology.pp), ("PCP", topology.pcp), ("DCP", topology.dcp))
    return " · ".join([f"TP {topology.tp}", *(f"{name} {size}" for name, size in named if size > 1)])


def format_group(group: CacheGroup) -> str:
    """`full, blocks of 16 tokens`."""
    if group.policy == "state":
        return "state"
    window = f" of {group.window_tokens}" if group.window_tokens else ""
    return f"{group.policy}{window}, blocks of {counted(group.block_tokens, 'token')}"


def format_engine(side: Side) -> str:
    """An engine in one line."""
    groups = "; ".join(map(format_group, side.groups))
    layers, heads = counted(side.layers, "layer"), counted(side.heads, "head")
    return f"{sizes(side)} · {layers} · {heads} · {'/'.join(side.dtypes)} · {groups}"


def format_tokens(interleave: Interleave) -> str:
    """The tokens that a worker holds: `all`, or `rank 1 of 2, 16 in a row`."""
    if interleave.ranks == 1:
        return "all"
    return f"rank {interleave.rank} of {interleave.ranks}, {interleave.run_tokens} in a row"
