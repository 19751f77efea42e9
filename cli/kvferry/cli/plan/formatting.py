"""Text formats of engines and workers, the same in tables and pictures."""

from __future__ import annotations

from kvferry.cli.formatting import counted, span
from kvferry.cli.plan.summary import Flow, Shard, Side
from kvferry.protocol.geometry import Interleave, Place
from kvferry.protocol.handshake import CacheGroup


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
    groups = "; ".join(format_group(group) for group in side.groups)
    layers, heads = counted(side.layers, "layer"), counted(side.heads, "head")
    return f"{sizes(side)} · {layers} · {heads} · {'/'.join(side.dtypes)} · {groups}"


def format_tokens(interleave: Interleave) -> str:
    """The tokens that a worker holds: `all`, or `rank 1 of 2, 16 in a row`."""
    if interleave.ranks == 1:
        return "all"
    return f"rank {interleave.rank} of {interleave.ranks}, {interleave.run_tokens} in a row"


def format_shard(shard: Shard) -> str:
    """The layers, heads and tokens that a worker holds."""
    return f"layers {span(shard.layers)}, heads {span(shard.heads)}, tokens {format_tokens(shard.interleave)}"


def placing_of(flow: Flow) -> str:
    """`direct`, `staged`, both, or `release only`."""
    return "+".join(sorted({read.placing for read in flow.reads})) or "release only"


def format_place(place: Place) -> str:
    """A worker's name, as in the log."""
    return str(place)
