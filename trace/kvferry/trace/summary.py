"""Timelines of a recording, the slowest handover first, and the durations of each phase over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.trace.clocks import Clocks, compare
from kvferry.trace.events import Phase
from kvferry.trace.handover import match
from kvferry.trace.reading import Recording
from kvferry.trace.timeline import Span, Timeline, make_timeline


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
class Merged:
    """All handovers of a recording.

    Attributes:
        timelines: the slowest handover first; then those that never ended, the longest held first.
    """

    timelines: tuple[Timeline, ...]
    clocks: Clocks


def merge(recording: Recording) -> Merged:
    """Join all processes' events, align their clocks and make the timeline of every handover."""
    handovers = match(recording.processes)
    clocks = compare(handovers)
    timelines = [make_timeline(handover, clocks) for handover in handovers]
    timelines.sort(key=_slowness, reverse=True)
    return Merged(tuple(timelines), clocks)


def _slowness(timeline: Timeline) -> tuple[int, int]:
    # Those that never ended come last, whatever they took.
    lasted_ns = -1
    if timeline.lasted_ns is not None:
        lasted_ns = timeline.lasted_ns
    held_ns = 0
    if timeline.held is not None:
        held_ns = timeline.held.lasted_ns
    return (lasted_ns, held_ns)


def has_id(timeline: Timeline, request: str) -> bool:
    """Whether an id of the handover contains `request`: the producer's, the consumer's, the trace's or the lease's."""
    # A part is enough: both engines' ids contain the `X-Request-Id` that the router sent them.
    handover = timeline.handover
    ids = [handover.producer_request, handover.consumer_request, handover.traceparent]
    if handover.lease is not None:
        ids.append(handover.lease.epoch)
    return any(request in known for known in ids)
