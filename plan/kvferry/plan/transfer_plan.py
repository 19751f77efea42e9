"""The transfer plan of one consumer worker and one producer engine: a frozen value, computed once per peer."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.plan.engine_shape import EngineShape
from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import StagedSource
from kvferry.plan.tokens import TokenMap, shared_part
from kvferry.plan.wording import format_numbers, format_places
from kvferry.protocol.geometry import PagedTensor, Place, Range

MAX_LINE = 800
"""Characters of a plan's line in the log; what does not fit follows at DEBUG."""
_MOST_UNITS = 4
_MOST_RANKS_NAMED = 4
_NAMED_A_LINE = 16


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
        return (
            len(self.heads) * self.local.tiles * self.local.cell_bytes
            if self.tokens.is_state
            else 0
        )


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
    sources: tuple[StagedSource, ...]
    expected: int

    def placing_of(self, bundle: Bundle) -> Placing:
        """How a bundle of this route is placed."""
        return self.slices[bundle.members[0][0]].placing

    @property
    def unit_descriptors(self) -> float:
        """Descriptors for one unit of every group; those of whole blocks are divided by their units."""
        direct = sum(
            one.unit_runs for one in self.bundles if self.placing_of(one) is Placing.DIRECT
        )
        return direct + sum(source.unit_descriptors for source in self.sources)

    @property
    def heads(self) -> Range | None:
        """The first to the last head that is read of attention, `[start, stop)`; None without attention."""
        held = [item.heads for item in self.slices if not item.tokens.is_state]
        return (
            Range(min(heads.start for heads in held), max(heads.stop for heads in held))
            if held
            else None
        )

    def phrases(self) -> tuple[str, ...]:
        """The reads without place and heads: tensors, bytes, placing, runs; empty for a release."""
        if not self.slices:
            return ()
        phrases = [f"{len(self.slices)} tensors"]
        token_bytes = sum(item.token_bytes for item in self.slices)
        state_bytes = sum(item.state_bytes for item in self.slices)
        if token_bytes:
            phrases.append(f"{token_bytes:g} B/token")
        if state_bytes:
            phrases.append(f"{state_bytes} B/request")
        placings = "+".join(sorted({item.placing.value for item in self.slices}))
        reasons = "; ".join(self._reasons_for_staging())
        phrases.append(f"{placings} ({reasons})" if reasons else placings)
        runs = f"runs of {_lengths(bundle.run_bytes for bundle in self.bundles)} B"
        if self.sources:
            runs += (
                f" read in runs of {_lengths(source.bundle.run_bytes for source in self.sources)} B"
            )
        phrases.append(runs)
        units = sorted(
            {bundle.tokens.unit_tokens for bundle in self.bundles if not bundle.tokens.is_state}
        )
        if units:
            phrases.append(f"units of {'/'.join(str(unit) for unit in units[:_MOST_UNITS])} tokens")
        return (*phrases, f"{self.unit_descriptors:g} descriptors a unit")

    def _reasons_for_staging(self) -> list[str]:
        reasons = [item.reason for item in self.slices if item.placing is Placing.STAGED]
        return list(dict.fromkeys(reasons))


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The reads of one consumer worker.

    Attributes:
        producer: engine id of the producer.
        place: the consumer worker's place.
        worker: the consumer worker's index in its engine.
        routes: one per producer worker to be read from or notified.
        shapes: sizes of the consumer and of the producer, for the log.
    """

    producer: str
    place: Place
    worker: int
    routes: tuple[Route, ...]
    shapes: tuple[EngineShape, EngineShape]

    def describe(self) -> str:
        """The plan in one line, for the log at INFO: both engines, and as many kinds of reads as `MAX_LINE` allows."""
        return self.describe_all()[0]

    def describe_all(self) -> tuple[str, ...]:
        """The whole plan in lines: that of `describe`, and those at DEBUG of what it has no room for.

        Workers that are read alike, but for their heads, are one kind of reads.
        """
        here, there = self.shapes
        start = f"plan producer={self.producer} {self.place}"
        line = f"{start} of [{here}] from [{there}]: "
        if not self.routes:
            return (f"{line}needs nothing",)
        alike: dict[tuple[str, ...], list[Route]] = {}
        for route in self.routes:
            alike.setdefault(route.phrases(), []).append(route)
        told: list[str] = []
        more: list[str] = []
        for phrases, routes in alike.items():
            text, rest = _describe(phrases, routes)
            if len(line) + len("; ".join([*told, text])) > MAX_LINE and told:
                more += [text, *rest]
                continue
            told.append(text)
            more += rest
        if more:
            told.append(f"{len(more)} more lines at DEBUG")
        return (line + "; ".join(told), *(f"{start} {text}" for text in more))


def _describe(phrases: tuple[str, ...], routes: Sequence[Route]) -> tuple[str, list[str]]:
    """Routes that differ only in place and heads: their text, and lines of what it leaves out."""
    places = [route.place for route in routes]
    text = format_places(places)
    # Places that are many and without order are only counted: each is named in further lines.
    is_short = " of tp" in text
    if not phrases:
        return f"releases {text}", _each("releases", map(str, places)) if is_short else []
    tensors, *others = phrases
    reads = f"reads {text}: {tensors}"
    if len(routes) == 1:
        return ", ".join([reads, *map(_format_heads, filter(None, [routes[0].heads])), *others]), []
    reads = f"reads {text}: each {tensors}"
    heads, is_whole = _format_heads_of_many(routes)
    named = [
        f"{route.place} ({_format_heads(route.heads)})" if route.heads else str(route.place)
        for route in routes
    ]
    rest = [] if is_whole and not is_short else _each("reads", named)
    return ", ".join([reads, *heads, *others]), rest


def _format_heads_of_many(routes: Sequence[Route]) -> tuple[list[str], bool]:
    """Which heads come from which of several workers, and whether that says it of each.

    Numbers of tensor parallel ranks and of heads usually rise together: then the first to the last head, and how many
    come from each rank, say it.
    """
    of_rank: dict[int, Range] = {}
    for route in routes:
        if route.heads is None:
            return [], True
        if of_rank.setdefault(route.place.tp, route.heads) != route.heads:
            return [_format_all_heads(routes)], False
    held = [of_rank[rank] for rank in sorted(of_rank)]
    first = held[0]
    if all(heads == first for heads in held):
        return [f"{_format_heads(first)} of each"], True
    is_in_order = all(
        heads.start == before.stop and len(heads) == len(before)
        for before, heads in itertools.pairwise(held)
    )
    if is_in_order:
        return [
            f"{_format_heads(Range(first.start, held[-1].stop))} ({len(first)} of each rank, in order)"
        ], True
    if len(held) <= _MOST_RANKS_NAMED:
        named = [f"{_format_heads(of_rank[rank])} of tp{rank}" for rank in sorted(of_rank)]
        return [", ".join(named)], True
    return [_format_all_heads(routes)], False


def _format_all_heads(routes: Sequence[Route]) -> str:
    heads = sorted(
        {
            head
            for route in routes
            if route.heads
            for head in range(route.heads.start, route.heads.stop)
        }
    )
    return f"heads {format_numbers(heads)}"


def _format_heads(heads: Range) -> str:
    last = heads.stop - 1
    return f"head {last}" if len(heads) == 1 else f"heads {heads.start}…{last}"


def _each(verb: str, named: Iterable[str]) -> list[str]:
    """Lines that name every worker."""
    names = list(named)
    starts = range(0, len(names), _NAMED_A_LINE)
    return [f"{verb} {', '.join(names[start : start + _NAMED_A_LINE])}" for start in starts]


def _lengths(found: Iterable[int]) -> str:
    """The shortest and the longest length, as text."""
    lengths = sorted(found)
    return f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]}…{lengths[-1]}"
