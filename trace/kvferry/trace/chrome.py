"""Export in the Trace Event Format of ui.perfetto.dev and chrome://tracing.

A process of the format is an engine, a thread one lane of its scheduler or of a worker: slices of a thread must nest,
so overlapping handovers are in different lanes. Steps of a prefill that is read meanwhile, and the reads, have lanes of
their own. Arrows go from the producer's prompt to the consumer's, and from the order to load to every worker. Times are
microseconds since the first event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.trace.events import Phase
from kvferry.trace.timeline import Span, Timeline


def lanes(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each `[begin, end)`: the lowest one that is free, so that intervals in one lane do not overlap.

    >>> lanes([(0, 5), (2, 4), (4, 9), (5, 6)])
    [0, 1, 1, 0]
    """
    chosen = [0] * len(intervals)
    ends: list[int] = []
    for index in sorted(range(len(intervals)), key=lambda at: intervals[at]):
        begun, ended = intervals[index]
        lane = next(
            (lane for lane, busy_until in enumerate(ends) if busy_until <= begun), len(ends)
        )
        ends[lane : lane + 1] = [max(ended, begun + 1)]
        chosen[index] = lane
    return chosen


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
    for one in timelines:
        _add(tracks, arrows, one)
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for event in _events(tracks, arrows):
        yield separator + _encode(event).decode()
        separator = ",\n"
    yield "\n]}\n"


def _add(tracks: _Tracks, arrows: _Arrows, one: Timeline) -> None:
    handover, args = one.handover, _args(one)
    prefill = None
    if handover.prefill is not None:
        spans = (*one.before, *((one.held,) if one.held else ()))
        prefill = _bar(f"prefill {handover.producer_request}", spans, one.zero_ns, args)
        tracks[handover.producer]["prefills"].append(prefill)
        if one.steps:
            steps = _bar(
                f"steps {handover.producer_request}",
                (step.span for step in one.steps),
                one.zero_ns,
                args,
            )
            tracks[handover.producer]["prefill steps"].append(steps)
    if handover.decode is None:
        return
    own = (span for span in (*one.to_load, *one.from_load) if span.phase not in _NOT_THE_CONSUMERS)
    decode = _bar(
        f"handover {handover.consumer_request}", (*own, *_loading(one)), one.zero_ns, args
    )
    tracks[handover.consumer]["handovers"].append(decode)
    if prefill is not None:
        handed_over_ns = min(one.zero_ns, decode.begun_ns)
        arrows.append(
            (prefill, min(max(handed_over_ns, prefill.begun_ns), prefill.ended_ns), decode)
        )
    ordered = next((span.begun_ns for span in decode.inside if span.phase == Phase.LOAD), None)
    for worker in one.workers:
        process = worker.load.process
        load = _bar(
            f"load {handover.consumer_request}",
            worker.spans,
            one.zero_ns,
            args | worker.load.figures,
        )
        thread = f"worker {process.place or f'pid {process.pid}'}"
        tracks[process.engine_id][thread].append(load)
        if worker.chunks:
            bar = f"reads {handover.consumer_request}"
            reads = _bar(bar, (chunk.span for chunk in worker.chunks), one.zero_ns, args)
            tracks[process.engine_id][f"{thread} reads"].append(reads)
        if ordered is not None:
            arrows.append((decode, ordered, load))


def _loading(one: Timeline) -> tuple[Span, ...]:
    """The load of all workers: from the scheduler's order to the end of the last worker's load."""
    ordered = next((span.begun_ns for span in one.to_load if span.phase == Phase.ORDER), None)
    if ordered is None or one.last is None:
        return ()
    return (Span(Phase.LOAD, ordered, max(ordered, one.last.ended_ns)),)


def _bar(name: str, spans: Iterable[Span], otherwise_ns: int, args: _Json) -> _Bar:
    """A slice around these spans; inner slices are moved so that none begins before the previous one ends."""
    inside: list[Span] = []
    for span in sorted(spans, key=lambda one: one.begun_ns):
        begun_ns = max(span.begun_ns, inside[-1].ended_ns) if inside else span.begun_ns
        inside.append(Span(span.phase, begun_ns, max(begun_ns, span.ended_ns)))
    begun_ns, ended_ns = (
        (inside[0].begun_ns, inside[-1].ended_ns) if inside else (otherwise_ns, otherwise_ns)
    )
    return _Bar(name, begun_ns, ended_ns, args, tuple(inside))


def _args(one: Timeline) -> _Json:
    handover = one.handover
    known = {
        "producer": handover.producer,
        "producer_request": handover.producer_request,
        "consumer": handover.consumer,
        "consumer_request": handover.consumer_request,
        "lease": f"{handover.lease.boot}/{handover.lease.epoch}" if handover.lease else "",
        "tokens": handover.tokens,
        "outcome": one.outcome,
        "total_bytes": one.bytes,
        "missing": ", ".join(one.missing),
    }
    return {name: value for name, value in known.items() if value}


def _events(tracks: _Tracks, arrows: _Arrows) -> Iterator[_Json]:
    bars = [bar for engine in tracks.values() for thread in engine.values() for bar in thread]
    zero_ns = min((bar.begun_ns for bar in bars), default=0)
    for pid, (engine_id, threads) in enumerate(sorted(tracks.items()), 1):
        yield _meta("process_name", pid, 0, engine_id)
        first = 1
        for name, thread in sorted(threads.items()):
            chosen = lanes([(bar.begun_ns, bar.ended_ns) for bar in thread])
            used = max(chosen) + 1
            for lane in range(used):
                yield _meta(
                    "thread_name", pid, first + lane, name if used == 1 else f"{name} {lane + 1}"
                )
            for bar, lane in zip(thread, chosen, strict=True):
                bar.where = {"cat": "kvferry", "pid": pid, "tid": first + lane}
                when = _when(bar.begun_ns, bar.ended_ns, zero_ns)
                yield {"ph": "X", "name": bar.name, **when, **bar.where, "args": bar.args}
                for span in bar.inside:
                    when = _when(span.begun_ns, span.ended_ns, zero_ns)
                    yield {"ph": "X", "name": span.phase, **when, **bar.where}
            first += used
    for number, (start, at_ns, end) in enumerate(arrows, 1):
        arrow = {"name": "handed over", "id": number}
        yield {"ph": "s", **arrow, "ts": (at_ns - zero_ns) / 1000, **start.where}
        yield {"ph": "f", **arrow, "ts": (end.begun_ns - zero_ns) / 1000, "bp": "e", **end.where}


def _when(begun_ns: int, ended_ns: int, zero_ns: int) -> _Json:
    return {"ts": (begun_ns - zero_ns) / 1000, "dur": (ended_ns - begun_ns) / 1000}


def _meta(kind: str, pid: int, tid: int, name: str) -> _Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
