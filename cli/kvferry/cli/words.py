"""Numbers and engines in words, the same in tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.cli.summary import Flow, Shard, Side
from kvferry.protocol.geometry import Interleave, Place, Range
from kvferry.protocol.handshake import CacheGroup

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")


def binary_bytes(num_bytes: float) -> str:
    """Sizes of memory: `16 KiB`, `1.5 GiB`."""
    return _scaled(num_bytes, 1024, _BINARY)


def decimal_bytes(num_bytes: float) -> str:
    """What goes over a link: `1.07 GB`."""
    return _scaled(num_bytes, 1000, _DECIMAL)


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < step:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def span(held: Range) -> str:
    """A half-open range by its first and last: `0…3`, `5`, or a dash."""
    if not len(held):
        return "–"
    return f"{held.start}" if len(held) == 1 else f"{held.start}…{held.stop - 1}"


def spans(held: Iterable[Range]) -> str:
    """Several of them."""
    return ", ".join(span(one) for one in held)


def sizes(side: Side) -> str:
    """`TP 4 · PP 2`: the parallel sizes above 1, and always the tensor-parallel one."""
    topology = side.topology
    named = (("PP", topology.pp), ("PCP", topology.pcp), ("DCP", topology.dcp))
    return " · ".join([f"TP {topology.tp}", *(f"{name} {size}" for name, size in named if size > 1)])


def group_words(group: CacheGroup) -> str:
    """`full, blocks of 16 tokens`."""
    if group.policy == "state":
        return "state"
    window = f" of {group.window_tokens}" if group.window_tokens else ""
    return f"{group.policy}{window}, blocks of {counted(group.block_tokens, 'token')}"


def engine_words(side: Side) -> str:
    """An engine in one line."""
    groups = "; ".join(group_words(group) for group in side.groups)
    layers, heads = counted(side.layers, "layer"), counted(side.heads, "head")
    return f"{sizes(side)} · {layers} · {heads} · {'/'.join(side.dtypes)} · {groups}"


def tokens_words(interleave: Interleave) -> str:
    """Which tokens a worker holds."""
    if interleave.ranks == 1:
        return "all"
    return f"rank {interleave.rank} of {interleave.ranks}, {interleave.run_tokens} in a row"


def shard_words(shard: Shard) -> str:
    """What a worker holds."""
    return f"layers {span(shard.layers)}, heads {span(shard.heads)}, tokens {tokens_words(shard.interleave)}"


def placing_of(flow: Flow) -> str:
    """`direct`, `staged`, both, or `release only`."""
    return "+".join(sorted({read.placing for read in flow.reads})) or "release only"


def place_words(place: Place) -> str:
    """A worker's name, as in the log."""
    return str(place)
