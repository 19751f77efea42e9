"""What a recording says: its handovers, the slowest first, and the durations of each phase over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.trace.clocks import compare
from kvferry.trace.events import Phase
from kvferry.trace.handover import match
from kvferry.trace.reading import Recording
from kvferry.trace.timeline import Span, Timeline, make_timeline

_MAX_NOTES = 8
"""Of one kind."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of one phase.

    Attributes:
        count: times recorded; a load's stages count once for every worker, from the end of the prefill on.
    """

    phase: Phase
    count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


def durations(timelines: Iterable[Timeline]) -> tuple[Durations, ...]:
    """Durations of every recorded phase, in the order of a handover."""
    lasted_ns: dict[Phase, list[int]] = {phase: [] for phase in Phase}
    for timeline in timelines:
        if timeline.lasted_ns is not None:
            lasted_ns[Phase.HANDOVER].append(timeline.lasted_ns)
        for span in _recorded_spans(timeline):
            lasted_ns[span.phase].append(span.lasted_ns)
    result = []
    for phase, values in lasted_ns.items():
        if values:
            values.sort()
            p50_ns = _percentile(values, 50)
            p99_ns = _percentile(values, 99)
            result.append(Durations(phase, len(values), p50_ns, p99_ns, values[-1]))
    return tuple(result)


def _recorded_spans(timeline: Timeline) -> Iterator[Span]:
    yield from timeline.before
    yield from timeline.to_load
    # Of every worker: one that is slow, but not the last, is in no critical path.
    for worker in timeline.workers:
        yield from timeline.after_prefill(worker.spans)
        yield from worker.chunks
    yield from timeline.steps
    yield from timeline.from_load
    if timeline.held is not None:
        yield timeline.held


def outcomes(timelines: Iterable[Timeline]) -> dict[str, int]:
    """Number of handovers by outcome, the most frequent first."""
    counted = Counter(timeline.outcome for timeline in timelines)
    return dict(counted.most_common())


def _percentile(values: Sequence[int], percent: int) -> int:
    """By nearest rank: the least of the sorted values that `percent` of all do not exceed."""
    rank = -(-percent * len(values) // 100)
    return values[max(0, rank - 1)]


@dataclass(frozen=True, slots=True)
class Summary:
    """The selected handovers of a recording.

    Attributes:
        timelines: the slowest handover first; then those that never ended, the longest held first.
        durations: of every phase.
        outcomes: number of handovers by outcome.
        num_processes: processes whose files were read.
        notes: about clocks and damaged files, one line each.
    """

    timelines: tuple[Timeline, ...]
    durations: tuple[Durations, ...]
    outcomes: dict[str, int]
    num_processes: int
    notes: tuple[str, ...]


def summarize(recording: Recording, request: str = "") -> Summary:
    """Join all processes' events, align their clocks and make the timeline of every handover.

    Args:
        request: a part of any id of the handovers that are selected; all have the empty one.
    """
    handovers = match(recording.processes)
    clocks = compare(handovers)
    timelines = [
        make_timeline(handover, clocks)
        for handover in handovers
        if handover.has_id(request)
    ]
    timelines.sort(key=_slowness, reverse=True)
    return Summary(
        timelines=tuple(timelines),
        durations=durations(timelines),
        outcomes=outcomes(timelines),
        num_processes=len(recording.processes),
        notes=(
            *_first(clocks.notes, "more pairs of clocks"),
            *_first(recording.damage, "more problems with files"),
        ),
    )


def _first(problems: Sequence[object], more: str) -> list[str]:
    """The first problems, and the number of all others."""
    notes = [str(problem) for problem in problems[:_MAX_NOTES]]
    num_left = len(problems) - _MAX_NOTES
    if num_left > 0:
        notes.append(f"and {num_left} {more}")
    return notes


def _slowness(timeline: Timeline) -> tuple[int, int]:
    # Those that never ended come last, whatever they took.
    lasted_ns = -1
    if timeline.lasted_ns is not None:
        lasted_ns = timeline.lasted_ns
    held_ns = 0
    if timeline.held is not None:
        held_ns = timeline.held.lasted_ns
    return (lasted_ns, held_ns)
