"""The transfer plan of one consumer worker and one producer engine: a frozen value, computed once per peer."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from kvferry.plan.engine_shape import EngineShape
from kvferry.plan.refusals import PlanRefused, Reason
from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import StagedSource
from kvferry.plan.tokens import TokenMap, shared_part
from kvferry.plan.wording import format_numbers, format_places
from kvferry.protocol.geometry import PagedTensor, Place, Range

MAX_LINE = 800
"""Characters of a plan's line in the log; what does not fit follows at DEBUG."""

SAME_HOST = "same host"
"""Why bytes are copied from mapped memory."""

# A plan of 64 ranks would otherwise fill pages, where an operator looks for one pair.
_MAX_UNITS_NAMED = 4
_MAX_RANKS_NAMED = 4
_NAMED_PER_LINE = 16


class Placing(str, enum.Enum):
    """How bytes are put in place."""

    DIRECT = "direct"
    """NIXL reads them into place."""
    STAGED = "staged"
    """NIXL reads them into a staging pool, from which a kernel puts them in place."""
    MAPPED = "mapped"
    """The producer's memory is mapped, and a kernel copies from there into place."""


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
        if not self.tokens.is_state:
            return 0
        return len(self.heads) * self.local.tiles * self.local.cell_bytes


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
        unless_mapped: why this worker cannot be read from if its memory is not mapped; empty if it can.
    """

    worker: int
    place: Place
    slices: tuple[Slice, ...]
    bundles: tuple[Bundle, ...]
    sources: tuple[StagedSource, ...]
    expected: int
    unless_mapped: tuple[Reason, ...] = ()

    def mapped(self) -> Route:
        """The same reads from mapped memory: without descriptors and without the pool, whatever the layouts."""
        slices = tuple(
            replace(one_slice, placing=Placing.MAPPED, reason=SAME_HOST)
            for one_slice in self.slices
        )
        return replace(self, slices=slices, sources=(), unless_mapped=())

    def placing_of(self, bundle: Bundle) -> Placing:
        """How a bundle of this route is placed."""
        return self.slices[bundle.members[0][0]].placing

    @property
    def unit_descriptors(self) -> float:
        """Descriptors for one unit of every group; those of whole blocks are divided by their units."""
        descriptors: float = 0
        for bundle in self.bundles:
            if self.placing_of(bundle) is Placing.DIRECT:
                descriptors += bundle.unit_runs
        return descriptors + sum(source.unit_descriptors for source in self.sources)

    @property
    def heads(self) -> Range | None:
        """The first to the last head that is read of attention, `[start, stop)`; None without attention."""
        ranges = [
            one_slice.heads
            for one_slice in self.slices
            if not one_slice.tokens.is_state
        ]
        if not ranges:
            return None
        start = min(heads.start for heads in ranges)
        stop = max(heads.stop for heads in ranges)
        return Range(start, stop)

    def phrases(self) -> tuple[str, ...]:
        """The reads without place and heads: tensors, bytes, placing, runs; empty for a release."""
        if not self.slices:
            return ()
        phrases = [f"{len(self.slices)} tensors"]
        token_bytes = sum(one_slice.token_bytes for one_slice in self.slices)
        if token_bytes:
            phrases.append(f"{token_bytes:g} B/token")
        state_bytes = sum(one_slice.state_bytes for one_slice in self.slices)
        if state_bytes:
            phrases.append(f"{state_bytes} B/request")
        phrases.append(self._placing_phrase())
        runs = f"runs of {_lengths([bundle.run_bytes for bundle in self.bundles])} B"
        if self.sources:
            source_runs = [source.bundle.run_bytes for source in self.sources]
            runs += f" read in runs of {_lengths(source_runs)} B"
        phrases.append(runs)
        units = {
            bundle.tokens.unit_tokens
            for bundle in self.bundles
            if not bundle.tokens.is_state
        }
        if units:
            named = [str(unit) for unit in sorted(units)[:_MAX_UNITS_NAMED]]
            phrases.append(f"units of {'/'.join(named)} tokens")
        phrases.append(f"{self.unit_descriptors:g} descriptors a unit")
        return tuple(phrases)

    def _placing_phrase(self) -> str:
        placings = {one_slice.placing.value for one_slice in self.slices}
        phrase = "+".join(sorted(placings))
        # Why something is staged decides what an operator can change; that reads in place are cheap
        # need not be said.
        reasons: dict[str, None] = {}
        for one_slice in self.slices:
            if one_slice.placing is Placing.STAGED:
                reasons[one_slice.reason] = None
        if reasons:
            phrase += f" ({'; '.join(reasons)})"
        return phrase


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The reads of one consumer worker.

    Attributes:
        producer: engine id of the producer.
        place: the consumer worker's place.
        worker: the consumer worker's index in its engine.
        routes: one per producer worker to be read from or notified.
        shapes: sizes of the consumer and of the producer, for the log.
        token_maps: of all bundles, each once, in their order.
    """

    producer: str
    place: Place
    worker: int
    routes: tuple[Route, ...]
    shapes: tuple[EngineShape, EngineShape]
    token_maps: tuple[TokenMap, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Once, not in every load: a map's hash is made of three objects, and a plan may have hundreds of bundles.
        token_maps = dict.fromkeys(
            bundle.tokens for route in self.routes for bundle in route.bundles
        )
        object.__setattr__(self, "token_maps", tuple(token_maps))

    def with_mapped(self, workers: Collection[int]) -> TransferPlan:
        """The plan where the memory of these producer workers is mapped.

        Raises:
            PlanRefused: another worker cannot be read from unless it is mapped.
        """
        # Nothing is compared: a mapped byte crosses the memory once, as a byte that is read in place does, and costs
        # no descriptor.
        routes = tuple(
            route.mapped() if route.worker in workers else route
            for route in self.routes
        )
        reasons = dict.fromkeys(
            reason for route in routes for reason in route.unless_mapped
        )
        if reasons:
            raise PlanRefused(list(reasons))
        return replace(self, routes=routes)

    def describe(self) -> str:
        """The plan in one line, for the log at INFO: both engines, and as many kinds of reads as `MAX_LINE` allows."""
        return self.describe_all()[0]

    def describe_all(self) -> tuple[str, ...]:
        """The whole plan in lines: that of `describe`, and those at DEBUG of what it has no room for.

        Workers that are read alike, but for their heads, are one kind of reads.
        """
        consumer, producer = self.shapes
        start = f"plan producer={self.producer} {self.place}"
        line = f"{start} of [{consumer}] from [{producer}]: "
        if not self.routes:
            return (f"{line}needs nothing",)
        alike: dict[tuple[str, ...], list[Route]] = {}
        for route in self.routes:
            alike.setdefault(route.phrases(), []).append(route)
        texts: list[str] = []
        more_lines: list[str] = []
        for phrases, routes in alike.items():
            text, details = _describe(phrases, routes)
            length = len(line) + len("; ".join([*texts, text]))
            # The first kind always has room, however long it is.
            if texts and length > MAX_LINE:
                more_lines.append(text)
            else:
                texts.append(text)
            more_lines += details
        if more_lines:
            texts.append(f"{len(more_lines)} more lines at DEBUG")
        return (line + "; ".join(texts), *(f"{start} {text}" for text in more_lines))


def _describe(
    phrases: tuple[str, ...], routes: Sequence[Route]
) -> tuple[str, list[str]]:
    """Routes that differ only in place and heads: their text, and lines of what it leaves out."""
    text = format_places(route.place for route in routes)
    # Places that are many and without order are only counted: each is named in further lines.
    are_only_counted = " of tp" in text
    if not phrases:
        details: list[str] = []
        if are_only_counted:
            details = _lines_of("releases", [str(route.place) for route in routes])
        return f"releases {text}", details
    tensors, *others = phrases
    if len(routes) == 1:
        parts = [f"reads {text}: {tensors}"]
        if routes[0].heads:
            parts.append(_format_heads(routes[0].heads))
        return ", ".join([*parts, *others]), []
    heads, is_complete = _format_heads_of_many(routes)
    details = []
    if are_only_counted or not is_complete:
        details = _lines_of("reads", [_format_route(route) for route in routes])
    return ", ".join([f"reads {text}: each {tensors}", *heads, *others]), details


def _format_route(route: Route) -> str:
    if not route.heads:
        return str(route.place)
    return f"{route.place} ({_format_heads(route.heads)})"


def _format_heads_of_many(routes: Sequence[Route]) -> tuple[list[str], bool]:
    """Which heads come from which of several workers; and True if that says it of each."""
    heads_of_rank: dict[int, Range] = {}
    for route in routes:
        if route.heads is None:
            return [], True
        heads = heads_of_rank.setdefault(route.place.tp, route.heads)
        if heads != route.heads:
            return [_format_all_heads(routes)], False
    ranks = sorted(heads_of_rank)
    ranges = [heads_of_rank[rank] for rank in ranks]
    first = ranges[0]
    if all(heads == first for heads in ranges):
        return [f"{_format_heads(first)} of each"], True
    # Numbers of tensor parallel ranks and of heads usually rise together: then the first to the
    # last head, and how many come from each rank, say it.
    is_in_order = all(
        heads.start == before.stop and len(heads) == len(before)
        for before, heads in itertools.pairwise(ranges)
    )
    if is_in_order:
        all_heads = _format_heads(Range(first.start, ranges[-1].stop))
        return [f"{all_heads} ({len(first)} of each rank, in order)"], True
    if len(ranks) <= _MAX_RANKS_NAMED:
        named = [f"{_format_heads(heads_of_rank[rank])} of tp{rank}" for rank in ranks]
        return [", ".join(named)], True
    return [_format_all_heads(routes)], False


def _format_all_heads(routes: Sequence[Route]) -> str:
    heads: set[int] = set()
    for route in routes:
        if route.heads:
            heads.update(range(route.heads.start, route.heads.stop))
    return f"heads {format_numbers(sorted(heads))}"


def _format_heads(heads: Range) -> str:
    last = heads.stop - 1
    if len(heads) == 1:
        return f"head {last}"
    return f"heads {heads.start}…{last}"


def _lines_of(verb: str, names: Sequence[str]) -> list[str]:
    """Lines that name every worker."""
    starts = range(0, len(names), _NAMED_PER_LINE)
    return [
        f"{verb} {', '.join(names[start : start + _NAMED_PER_LINE])}"
        for start in starts
    ]


def _lengths(lengths: Sequence[int]) -> str:
    """The shortest and the longest length, as text."""
    shortest = min(lengths)
    longest = max(lengths)
    if shortest == longest:
        return str(shortest)
    return f"{shortest}…{longest}"
