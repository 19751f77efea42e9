"""Timelines of a recording, the slowest handover first, and the durations of each phase over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.trace.clocks import Clocks, compare
from kvferry.trace.events import Phase
from kvferry.trace.handover import match
from kvferry.trace.reading import Recording
from kvferry.trace.timeline import Timeline, timeline


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
    found: dict[Phase, list[int]] = {phase: [] for phase in Phase}
    for one in timelines:
        if one.lasted_ns is not None:
            found[Phase.HANDOVER].append(one.lasted_ns)
        stages = (span for worker in one.workers for span in one.after_prefill(worker.spans))
        chunks = (
            chunk.span
            for part in (one.steps, *(worker.chunks for worker in one.workers))
            for chunk in part
        )
        for span in (
            *one.before,
            *one.to_load,
            *stages,
            *chunks,
            *one.from_load,
            *((one.held,) if one.held else ()),
        ):
            found[span.phase].append(span.lasted_ns)
    ordered = ((phase, sorted(lasted)) for phase, lasted in found.items() if lasted)
    return tuple(
        Durations(phase, len(of), _rank(of, 50), _rank(of, 99), of[-1]) for phase, of in ordered
    )


def outcomes(timelines: Iterable[Timeline]) -> dict[str, int]:
    """Number of handovers by outcome, the most frequent first."""
    return dict(Counter(one.outcome for one in timelines).most_common())


def _rank(lasted: Sequence[int], percent: int) -> int:
    """The percentile by nearest rank: the least value that `percent` of all do not exceed."""
    return lasted[max(0, -(-percent * len(lasted) // 100) - 1)]


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
    timelines = [timeline(handover, clocks) for handover in handovers]
    timelines.sort(key=_slowness, reverse=True)
    return Merged(tuple(timelines), clocks)


def _slowness(one: Timeline) -> tuple[int, int]:
    return (-1 if one.lasted_ns is None else one.lasted_ns, one.held.lasted_ns if one.held else 0)


def named(one: Timeline, request: str) -> bool:
    """Whether an id of the handover contains `request`: the producer's, the consumer's, the trace's or the lease's.

    Both engines' ids contain the `X-Request-Id` that the router sent them.
    """
    handover = one.handover
    lease = handover.lease.epoch if handover.lease else ""
    return any(
        request in known
        for known in (
            handover.producer_request,
            handover.consumer_request,
            lease,
            handover.traceparent,
        )
    )
