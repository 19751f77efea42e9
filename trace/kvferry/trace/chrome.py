"""Export in the Trace Event Format of ui.perfetto.dev and chrome://tracing.

| in the format | is |
| --- | --- |
| process | an engine |
| thread | one lane of its scheduler or of a worker; overlapping handovers are in different lanes |
| slice | a handover, a prefill or a load, with its phases inside |
| arrow | from the producer's prompt to the consumer's, and from the order to load to every worker |

Steps of a prefill that is read meanwhile, and the reads, have lanes of their own. Times are microseconds since the
first event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.trace.events import Phase
from kvferry.trace.timeline import Span, Timeline, WorkerSpans


def lanes(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each `[begin, end)`: the lowest one that is free, so that intervals in one lane do not overlap.

    >>> lanes([(0, 5), (2, 4), (4, 9), (5, 6)])
    [0, 1, 1, 0]
    """
    chosen = [0] * len(intervals)
    busy_until: list[int] = []  # by lane
    in_order = sorted(range(len(intervals)), key=intervals.__getitem__)
    for index in in_order:
        begun, ended = intervals[index]
        lane = _free_lane(busy_until, begun)
        if lane == len(busy_until):
            busy_until.append(0)
        # An empty interval takes its lane for a moment: viewers would draw two of them over each other.
        busy_until[lane] = max(ended, begun + 1)
        chosen[index] = lane
    return chosen


def _free_lane(busy_until: Sequence[int], begun: int) -> int:
    """The lowest lane that is free then; a new one if there is none."""
    for lane, until in enumerate(busy_until):
        if until <= begun:
            return lane
    return len(busy_until)


_Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_NOT_THE_CONSUMERS = frozenset({Phase.ROUTER, Phase.ORDER})
"""Phases left out of the consumer's handover: the router's, and the order, which is part of the scheduler's load."""


@dataclass(slots=True, eq=False)
class _Bar:
    """One slice with its inner slices.

    Attributes:
        where: its engine and lane, once they are numbered.
    """

    name: str
    begun_ns: int
    ended_ns: int
    args: _Json
    inside: tuple[Span, ...]
    where: _Json = field(default_factory=dict)


_Tracks = defaultdict[str, defaultdict[str, list[_Bar]]]
"""All bars, by engine and by thread."""
_Arrows = list[tuple[_Bar, int, _Bar]]
"""From a bar at a time in ns to the begin of another one."""


def chrome_trace(timelines: Sequence[Timeline]) -> Iterator[str]:
    """The JSON document in pieces."""
    tracks: _Tracks = defaultdict(lambda: defaultdict(list))
    arrows: _Arrows = []
    for timeline in timelines:
        _add(tracks, arrows, timeline)
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for event in _events(tracks, arrows):
        yield separator + _encode(event).decode()
        separator = ",\n"
    yield "\n]}\n"


def _add(tracks: _Tracks, arrows: _Arrows, timeline: Timeline) -> None:
    args = _args(timeline)
    prefill = None
    if timeline.handover.prefill is not None:
        prefill = _add_prefill(tracks, timeline, args)
    if timeline.handover.decode is None:
        return
    decode = _add_decode(tracks, timeline, args)
    if prefill is not None:
        # An arrow must begin within its bar, or viewers do not draw it.
        handed_over_ns = min(timeline.zero_ns, decode.begun_ns)
        begun_ns = min(max(handed_over_ns, prefill.begun_ns), prefill.ended_ns)
        arrows.append((prefill, begun_ns, decode))
    ordered_ns = _begin_of(Phase.LOAD, decode.inside)
    for worker in timeline.workers:
        load = _add_load(tracks, timeline, worker, args)
        if ordered_ns is not None:
            arrows.append((decode, ordered_ns, load))


def _add_prefill(tracks: _Tracks, timeline: Timeline, args: _Json) -> _Bar:
    handover = timeline.handover
    spans = timeline.before
    if timeline.held is not None:
        spans = (*spans, timeline.held)
    prefill = _bar(f"prefill {handover.producer_request}", spans, timeline.zero_ns, args)
    threads = tracks[handover.producer]
    threads["prefills"].append(prefill)
    if timeline.steps:
        step_spans = [step.span for step in timeline.steps]
        steps = _bar(f"steps {handover.producer_request}", step_spans, timeline.zero_ns, args)
        threads["prefill steps"].append(steps)
    return prefill


def _add_decode(tracks: _Tracks, timeline: Timeline, args: _Json) -> _Bar:
    handover = timeline.handover
    spans = []
    for span in (*timeline.to_load, *timeline.from_load):
        if span.phase not in _NOT_THE_CONSUMERS:
            spans.append(span)
    # The load of all workers: from the scheduler's order to the end of the last worker's load.
    ordered_ns = _begin_of(Phase.ORDER, timeline.to_load)
    if ordered_ns is not None and timeline.last is not None:
        spans.append(Span(Phase.LOAD, ordered_ns, max(ordered_ns, timeline.last.ended_ns)))
    decode = _bar(f"handover {handover.consumer_request}", spans, timeline.zero_ns, args)
    tracks[handover.consumer]["handovers"].append(decode)
    return decode


def _add_load(tracks: _Tracks, timeline: Timeline, worker: WorkerSpans, args: _Json) -> _Bar:
    request = timeline.handover.consumer_request
    process = worker.load.process
    name = process.place or f"pid {process.pid}"
    thread = f"worker {name}"
    threads = tracks[process.engine_id]
    figures = args | worker.load.figures
    load = _bar(f"load {request}", worker.spans, timeline.zero_ns, figures)
    threads[thread].append(load)
    if worker.chunks:
        chunk_spans = [chunk.span for chunk in worker.chunks]
        reads = _bar(f"reads {request}", chunk_spans, timeline.zero_ns, args)
        threads[f"{thread} reads"].append(reads)
    return load


def _begin_of(phase: Phase, spans: Iterable[Span]) -> int | None:
    for span in spans:
        if span.phase == phase:
            return span.begun_ns
    return None


def _bar(name: str, spans: Iterable[Span], otherwise_ns: int, args: _Json) -> _Bar:
    """A slice around these spans; without any an empty one at `otherwise_ns`."""
    inside: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begun_ns):
        # Slices of a thread must nest, so none may begin before the previous one ends.
        begun_ns = span.begun_ns
        if inside:
            begun_ns = max(begun_ns, inside[-1].ended_ns)
        inside.append(Span(span.phase, begun_ns, max(begun_ns, span.ended_ns)))
    if not inside:
        return _Bar(name, otherwise_ns, otherwise_ns, args, ())
    return _Bar(name, inside[0].begun_ns, inside[-1].ended_ns, args, tuple(inside))


def _args(timeline: Timeline) -> _Json:
    handover = timeline.handover
    lease = ""
    if handover.lease is not None:
        lease = f"{handover.lease.boot}/{handover.lease.epoch}"
    known = {
        "producer": handover.producer,
        "producer_request": handover.producer_request,
        "consumer": handover.consumer,
        "consumer_request": handover.consumer_request,
        "lease": lease,
        "tokens": handover.tokens,
        "outcome": timeline.outcome,
        "total_bytes": timeline.bytes,
        "missing": ", ".join(timeline.missing),
    }
    return {name: value for name, value in known.items() if value}


def _events(tracks: _Tracks, arrows: _Arrows) -> Iterator[_Json]:
    zero_ns = _first_ns(tracks)
    for pid, (engine_id, threads) in enumerate(sorted(tracks.items()), 1):
        yield _meta("process_name", pid, 0, engine_id)
        next_tid = 1
        for name, bars in sorted(threads.items()):
            lane_of_bar = lanes([(bar.begun_ns, bar.ended_ns) for bar in bars])
            num_lanes = max(lane_of_bar) + 1
            for lane in range(num_lanes):
                lane_name = name if num_lanes == 1 else f"{name} {lane + 1}"
                yield _meta("thread_name", pid, next_tid + lane, lane_name)
            for bar, lane in zip(bars, lane_of_bar, strict=True):
                bar.where = {"cat": "kvferry", "pid": pid, "tid": next_tid + lane}
                yield from _slices(bar, zero_ns)
            next_tid += num_lanes
    # After all bars, whose lanes are numbered only now.
    for number, (start, at_ns, end) in enumerate(arrows, 1):
        arrow = {"name": "handed over", "id": number}
        begun_us = (at_ns - zero_ns) / 1000
        ended_us = (end.begun_ns - zero_ns) / 1000
        yield {"ph": "s", **arrow, "ts": begun_us, **start.where}
        yield {"ph": "f", **arrow, "ts": ended_us, "bp": "e", **end.where}


def _first_ns(tracks: _Tracks) -> int:
    begins = []
    for threads in tracks.values():
        for bars in threads.values():
            begins += [bar.begun_ns for bar in bars]
    return min(begins, default=0)


def _slices(bar: _Bar, zero_ns: int) -> Iterator[_Json]:
    when = _when(bar.begun_ns, bar.ended_ns, zero_ns)
    yield {"ph": "X", "name": bar.name, **when, **bar.where, "args": bar.args}
    for span in bar.inside:
        when = _when(span.begun_ns, span.ended_ns, zero_ns)
        yield {"ph": "X", "name": span.phase, **when, **bar.where}


def _when(begun_ns: int, ended_ns: int, zero_ns: int) -> _Json:
    return {"ts": (begun_ns - zero_ns) / 1000, "dur": (ended_ns - begun_ns) / 1000}


def _meta(kind: str, pid: int, tid: int, name: str) -> _Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
