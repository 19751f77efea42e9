"""From what was recorded to timelines, the slowest handover first."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.trace.clocks import Clocks, compare
from kvferry.trace.matching import match
from kvferry.trace.reading import Recording
from kvferry.trace.timeline import Timeline, timeline


@dataclass(frozen=True, slots=True)
class Merged:
    """All handovers of a recording.

    Attributes:
        timelines: the slowest handover first; then those that never ended, the longest held first.
    """

    timelines: tuple[Timeline, ...]
    clocks: Clocks


def merge(recording: Recording) -> Merged:
    """Join all processes' events, bring their clocks together and lay out every handover."""
    handovers = match(recording.processes)
    clocks = compare(handovers)
    timelines = [timeline(handover, clocks) for handover in handovers]
    timelines.sort(key=_slowness, reverse=True)
    return Merged(tuple(timelines), clocks)


def _slowness(one: Timeline) -> tuple[int, int]:
    return (-1 if one.lasted_ns is None else one.lasted_ns, one.held.lasted_ns if one.held else 0)


def named(one: Timeline, request: str) -> bool:
    """Whether a text is the beginning of an id of the handover: the producer's, the consumer's, the client's, the
    trace's or the lease's."""
    handover = one.handover
    arrivals = (handover.decode and handover.decode.arrived, handover.prefill and handover.prefill.arrived)
    traces = (arrival.traceparent.partition("-")[2] for arrival in arrivals if arrival)
    ids = (
        handover.producer_request,
        handover.consumer_request,
        handover.correlation,
        handover.lease.epoch if handover.lease else "",
        *traces,
    )
    return any(known.startswith(request) for known in ids)
