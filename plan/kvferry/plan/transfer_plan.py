"""The transfer plan of one consumer worker and one producer engine: a frozen value, computed once per peer."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import Source
from kvferry.plan.tokens import TokenMap, shared_part
from kvferry.protocol.geometry import PagedTensor, Place, Range

MAX_LINE = 600
"""Characters of a plan's line in the log, from which on further kinds of reads are counted only."""
_MOST_PARTS = 3
_MOST_UNITS = 4


class Placing(str, enum.Enum):
    """How bytes are put in place."""

    DIRECT = "direct"
    """NIXL reads them into place."""
    STAGED = "staged"
    """NIXL reads them into a staging pool, from which a kernel puts them in place."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one paged tensor that a route reads.

    Attributes:
        local, remote: the tensor on each side.
        heads: the global heads that are read.
        tokens: how the tokens correspond.
        placing, reason: how the bytes are put in place, and why.
        run_bytes: contiguous bytes of one descriptor, merged with other slices.
        unit_runs: this slice's portion of the descriptors of one unit.
    """

    local: PagedTensor
    remote: PagedTensor
    heads: Range
    tokens: TokenMap
    placing: Placing
    reason: str
    run_bytes: int
    unit_runs: float

    @property
    def token_bytes(self) -> float:
        """Bytes in the consumer worker's cache per token of a prompt; 0 for a recurrent state."""
        if self.tokens.is_state:
            return 0.0
        part = shared_part(self.tokens.local.share, self.tokens.remote.share)
        return part * len(self.heads) * self.local.cell_bytes / self.local.tile_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes per request of a recurrent state; 0 for everything else."""
        return len(self.heads) * self.local.tiles * self.local.cell_bytes if self.tokens.is_state else 0


@dataclass(frozen=True, slots=True)
class Route:
    """All reads from one producer worker.

    Attributes:
        worker: index of the worker in the producer's description.
        place: its place.
        slices: the reads; empty if the worker is only notified that its copy is not needed.
        bundles: the slices merged into the runs that both sides share; `members` index `slices`.
        sources: the staged reads, in the runs of the producer.
        expected: number of consumer workers that report `done` to this producer worker.
    """

    worker: int
    place: Place
    slices: tuple[Slice, ...]
    bundles: tuple[Bundle, ...]
    sources: tuple[Source, ...]
    expected: int

    def placing_of(self, bundle: Bundle) -> Placing:
        """How a bundle of this route is placed."""
        return self.slices[bundle.members[0][0]].placing

    @property
    def unit_descriptors(self) -> float:
        """Descriptors for one unit of every group; those of whole blocks are divided by their units."""
        direct = sum(one.unit_runs for one in self.bundles if self.placing_of(one) is Placing.DIRECT)
        return direct + sum(source.unit_descriptors for source in self.sources)

    @property
    def heads(self) -> Range | None:
        """The first to the last head that is read of attention, `[start, stop)`; None without attention."""
        held = [item.heads for item in self.slices if not item.tokens.is_state]
        return Range(min(heads.start for heads in held), max(heads.stop for heads in held)) if held else None

    def phrases(self) -> tuple[str, ...]:
        """The reads without place and heads: tensors, bytes, runs and placing; empty for a release."""
        if not self.slices:
            return ()
        tensors = [f"{len(self.slices)} tensors", f"{sum(item.token_bytes for item in self.slices):g} B/token"]
        if state_bytes := sum(item.state_bytes for item in self.slices):
            tensors.append(f"{state_bytes} B/request")
        units = sorted({bundle.tokens.unit_tokens for bundle in self.bundles if not bundle.tokens.is_state})
        parts = ["+".join(sorted({item.placing.value for item in self.slices}))]
        runs = f"runs of {_lengths(bundle.run_bytes for bundle in self.bundles)} B"
        if self.sources:
            runs += f" read in runs of {_lengths(source.bundle.run_bytes for source in self.sources)} B"
        parts.append(runs)
        if units:
            parts.append(f"units of {'/'.join(str(unit) for unit in units[:_MOST_UNITS])} tokens")
        return (*tensors, *parts, f"{self.unit_descriptors:g} descriptors a unit")


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The reads of one consumer worker.

    Attributes:
        producer: engine id of the producer.
        place: the consumer worker's place.
        worker: the consumer worker's index in its engine.
        routes: one per producer worker to be read from or notified.
    """

    producer: str
    place: Place
    worker: int
    routes: tuple[Route, ...]

    def describe(self) -> str:
        """The plan in one line, for the log: producer, places, bytes and runs.

        Workers that are read alike are described together, and the line has at most `MAX_LINE` characters.
        """
        alike: dict[tuple[str, ...], list[Route]] = {}
        for route in self.routes:
            alike.setdefault(route.phrases(), []).append(route)
        described = [_describe(phrases, routes) for phrases, routes in alike.items()]
        line = f"plan producer={self.producer} {self.place} "
        if not described:
            return f"{line}needs nothing"
        for index, one in enumerate(described):
            if len(line) + len(one) > MAX_LINE and index:
                return f"{line}and {len(described) - index} more kinds of reads"
            line += f"{one}; " if index + 1 < len(described) else one
        return line


def _describe(phrases: tuple[str, ...], routes: Sequence[Route]) -> str:
    """Routes that differ only in place and heads."""
    places = format_places(route.place for route in routes)
    if not phrases:
        return f"releases {places}"
    held = [route.heads for route in routes]
    numbers = sorted({head for heads in held if heads is not None for head in range(heads.start, heads.stop)})
    heads = [f"head{'s' if len(numbers) > 1 else ''} {format_numbers(numbers)}"] if numbers else []
    tensors, *others = phrases
    each = f"each {tensors}" if len(routes) > 1 else tensors
    return f"reads {places}: " + ", ".join([each, *heads, *others])


def format_places(places: Iterable[Place]) -> str:
    """The places of several workers, bounded in length: `tp0…7`, `tp0…56 by 8/pp0…1`.

    The decode context parallel rank, which follows from the others, is left out if there are several.
    """
    found = list(dict.fromkeys(places))
    if len(found) == 1:
        return str(found[0])
    ranks: dict[tuple[int, int], list[int]] = {}
    for place in found:
        ranks.setdefault((place.pp, place.pcp), []).append(place.tp)
    alike: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for (pp, pcp), held in ranks.items():
        alike.setdefault(tuple(sorted(held)), {}).setdefault(pcp, []).append(pp)
    parts = []
    for tps, by_pcp in alike.items():
        for pcp, stages in by_pcp.items():
            pps = _formatted(sorted(stages)) if any(stages) else [""]
            ends = [f"{f'/pp{pp}' if pp else ''}{f'/pcp{pcp}' if pcp else ''}" for pp in pps]
            parts += [f"tp{ranks}{end}" for ranks in _formatted(tps) for end in ends]
    last = max(place.tp for place in found)
    return ", ".join(parts) if len(parts) <= _MOST_PARTS else f"{len(found)} of tp{min(map(min, alike))}…{last}"


def format_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers, bounded in length: `0…7`, `0…56 by 8`, `1, 4…6`, `30 of 1…63`."""
    parts = _formatted(numbers)
    return ", ".join(parts) if len(parts) <= _MOST_PARTS else f"{len(numbers)} of {numbers[0]}…{numbers[-1]}"


def progressions(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending numbers as (first, last, step): single ones, ranges, and three or more with a step above 1."""
    found, left = [], list(numbers)
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        count = 1
        while count < len(left) and left[count] == left[0] + step * count:
            count += 1
        count, step = (1, 1) if count == 2 and step > 1 else (count, step)
        found.append((left[0], left[count - 1], step))
        del left[:count]
    return found


def _formatted(numbers: Sequence[int]) -> list[str]:
    return [
        f"{first}" if first == last else f"{first}…{last}{f' by {step}' if step > 1 else ''}"
        for first, last, step in progressions(numbers)
    ]


def _lengths(found: Iterable[int]) -> str:
    """The shortest and the longest length, as text."""
    lengths = sorted(found)
    return f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]}…{lengths[-1]}"
