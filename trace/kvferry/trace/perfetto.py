"""Export for ui.perfetto.dev, in the Trace Event Format.

| in the format | is |
| --- | --- |
| process | an engine |
| track | of a producer prefills, their steps, blocks kept; of a consumer handovers, loads and reads of each worker |
| slice | one request in such a track, with its ids and figures, and its phases inside |
| arrow | from a prefill to its handover, and to every worker's load |

Everything is an asynchronous slice: Perfetto stacks those that overlap, where complete events of threads (`X`) needed
lanes of our own. It names a track by its outermost slice and joins tracks of one name, so a slice with the track's name
is around that of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec

from kvferry.trace.timeline import Span, Timeline

_Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class _Slice:
    """A request in one track.

    Attributes:
        details: shown by a viewer for the selected slice.
        spans: its phases, at least one; in order, none begins before the previous one ends.
        arrow: fields of the event that begins it.
    """

    engine: str
    track: str
    request: str
    details: _Json
    spans: tuple[Span, ...]
    arrow: _Json = field(default_factory=dict)

    @property
    def begun_ns(self) -> int:
        return self.spans[0].begun_ns


def perfetto_trace(timelines: Iterable[Timeline]) -> Iterator[bytes]:
    """The JSON document in pieces; times are microseconds since the first event."""
    slices: list[_Slice] = []
    for number, timeline in enumerate(timelines, 1):
        slices += _slices(timeline, f"{number:#x}")
    # Microseconds since the epoch would leave a JSON number no digits for nanoseconds.
    zero_ns = min((piece.begun_ns for piece in slices), default=0)
    engines = sorted({piece.engine for piece in slices})
    pids = {engine: pid for pid, engine in enumerate(engines, 1)}

    lines: list[tuple[int, bytes]] = []
    for engine, pid in pids.items():
        named = {
            "ph": "M",
            "name": "process_name",
            "pid": pid,
            "args": {"name": engine},
        }
        lines.append((zero_ns, _encode(named)))
    for number, piece in enumerate(slices, 1):
        # With an `id` that is not local to the process Perfetto puts the track beside the engines, not into one.
        of_slice = {
            "cat": "kvferry",
            "pid": pids[piece.engine],
            "id2": {"local": f"{number:#x}"},
        }
        for at_ns, event in _events(piece):
            lines.append(
                (at_ns, _encode({"ts": (at_ns - zero_ns) / 1000, **event, **of_slice}))
            )
    # By time alone, and stable: what begins and ends at one time keeps its nesting.
    lines.sort(key=itemgetter(0))
    # Line by line: a recording of a day has millions, and the document as one text would be as many bytes again.
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    separator = b"\n"
    for _, line in lines:
        yield separator + line
        separator = b",\n"
    yield b"\n]}\n"


def _events(piece: _Slice) -> Iterator[tuple[int, _Json]]:
    """Begins and ends in their order, with their times in ns."""
    ended_ns = piece.spans[-1].ended_ns
    yield piece.begun_ns, {"ph": "b", "name": piece.track}
    yield (
        piece.begun_ns,
        {"ph": "b", "name": piece.request, "args": piece.details, **piece.arrow},
    )
    for span in piece.spans:
        details: _Json = {"meaning": span.phase.meaning}
        if span.stop_token is not None:
            details["stop_token"] = span.stop_token
        yield span.begun_ns, {"ph": "b", "name": span.phase.label, "args": details}
        yield span.ended_ns, {"ph": "e", "name": span.phase.label}
    yield ended_ns, {"ph": "e", "name": piece.request}
    yield ended_ns, {"ph": "e", "name": piece.track}


def _slices(timeline: Timeline, arrow: str) -> list[_Slice]:
    """The slices of one handover; its arrows have this id."""
    handover = timeline.handover
    details = _details(timeline)
    producers = _tracks(
        handover.producer,
        handover.producer_request,
        details,
        {
            "prefills": timeline.before,
            "prefill steps": timeline.steps,
            "blocks kept": (timeline.held,) if timeline.held else (),
        },
    )
    consumers = _tracks(
        handover.consumer,
        handover.consumer_request,
        details,
        {"handovers": timeline.path},
    )
    reads: list[_Slice] = []
    for worker in timeline.workers:
        of_worker = (
            worker.load.process.engine_id,
            handover.consumer_request,
            details | worker.load.figures,
        )
        consumers += _tracks(*of_worker, {f"loads of {worker.place}": worker.spans})
        reads += _tracks(*of_worker, {f"reads of {worker.place}": worker.chunks})
    if timeline.before and handover.prefill is not None:
        prefill = producers[0]
        prefill.arrow = {"bind_id": arrow, "flow_out": True}
        for piece in consumers:
            # Where clocks contradict each other an arrow would lead back in time, and cannot be drawn.
            if piece.begun_ns >= prefill.begun_ns:
                piece.arrow = {"bind_id": arrow, "flow_in": True}
    return producers + consumers + reads


def _tracks(
    engine: str, request: str, details: _Json, tracks: dict[str, tuple[Span, ...]]
) -> list[_Slice]:
    """A request's slices in the tracks of an engine in which it has any phase."""
    slices = []
    for track, spans in tracks.items():
        if spans:
            slices.append(
                _Slice(engine, track, request or "?", details, _in_order(spans))
            )
    return slices


def _in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Slices must nest: none begins before the previous one ends, as damaged records may say."""
    ordered: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begun_ns):
        begun_ns = span.begun_ns
        if ordered:
            begun_ns = max(begun_ns, ordered[-1].ended_ns)
        ended_ns = max(begun_ns, span.ended_ns)
        ordered.append(Span(span.phase, begun_ns, ended_ns, span.stop_token))
    return tuple(ordered)


def _details(timeline: Timeline) -> _Json:
    """The ids of a request in both engines, and what became of it."""
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
        "traceparent": handover.traceparent,
        "tokens": handover.tokens,
        "outcome": timeline.outcome,
        "total_bytes": timeline.bytes,
        "missing": ", ".join(timeline.missing),
    }
    return {name: value for name, value in known.items() if value}
