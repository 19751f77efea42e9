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

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec

from kvferry.trace.handover import Handover, RequestKey, Span
from kvferry.trace.outcome import missing_parts, outcome_of

_Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class _Slice:
    """A request in one track.

    Attributes:
        zero_ns: of its handover.
        details: shown by a viewer for the selected slice.
        spans: its phases, at least one; in order, none begins before the previous one ends.
        arrow: fields of the event that begins it.
    """

    engine: str
    track: str
    request: str
    zero_ns: int
    details: _Json
    spans: list[Span]
    arrow: _Json = field(default_factory=dict)

    @property
    def begun_ns(self) -> int:
        return self._ns(self.spans[0].begun_ms)

    def events(self) -> Iterator[tuple[int, _Json]]:
        """Begins and ends in their order, with their times."""
        ended_ns = self._ns(self.spans[-1].ended_ms)
        request = {"name": self.request, "args": self.details, **self.arrow}
        yield self.begun_ns, {"ph": "b", "name": self.track}
        yield self.begun_ns, {"ph": "b", **request}
        for span in self.spans:
            details: _Json = {"meaning": span.phase.meaning}
            if span.stop_token is not None:
                details["stop_token"] = span.stop_token
            phase = {"name": span.phase.label}
            yield self._ns(span.begun_ms), {"ph": "b", **phase, "args": details}
            yield self._ns(span.ended_ms), {"ph": "e", **phase}
        yield ended_ns, {"ph": "e", "name": self.request}
        yield ended_ns, {"ph": "e", "name": self.track}

    def _ns(self, at_ms: float) -> int:
        return self.zero_ns + round(at_ms * 1e6)


def perfetto_trace(handovers: Iterable[Handover]) -> Iterator[bytes]:
    """The JSON document in pieces; times are microseconds since the first event."""
    slices: list[_Slice] = []
    for number, handover in enumerate(handovers, 1):
        slices += _slices(handover, f"{number:#x}")
    # Microseconds since the epoch would leave a JSON number no digits for nanoseconds.
    zero_ns = min((piece.begun_ns for piece in slices), default=0)
    engines = sorted({piece.engine for piece in slices})
    pids = {engine: pid for pid, engine in enumerate(engines, 1)}

    lines: list[tuple[int, bytes]] = []
    for engine, pid in pids.items():
        event = {"ph": "M", "name": "process_name", "pid": pid}
        lines.append((zero_ns, _encode({**event, "args": {"name": engine}})))
    for number, piece in enumerate(slices, 1):
        # With an `id` that is not local to the process Perfetto puts the track beside the engines, not into one.
        of_slice = {
            "cat": "kvferry",
            "pid": pids[piece.engine],
            "id2": {"local": f"{number:#x}"},
        }
        for at_ns, event in piece.events():
            event = {"ts": (at_ns - zero_ns) / 1000, **event, **of_slice}
            lines.append((at_ns, _encode(event)))
    # By time alone, and stable: what begins and ends at one time keeps its nesting.
    lines.sort(key=itemgetter(0))
    # Line by line: a recording of a day has millions, and the document as one text would be as many bytes again.
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    separator = b"\n"
    for _, line in lines:
        yield separator + line
        separator = b",\n"
    yield b"\n]}\n"


def _slices(handover: Handover, arrow: str) -> list[_Slice]:
    """The slices of one handover, in the tracks in which it has any phase; its arrows have this id."""
    producer = handover.producer
    consumer = handover.consumer
    details = _details(handover)
    held = [handover.held] if handover.held else []
    tracks: list[tuple[RequestKey, str, Sequence[Span], _Json]] = [
        (producer, "prefills", handover.before, details),
        (producer, "prefill steps", handover.steps, details),
        (producer, "blocks kept", held, details),
        (consumer, "handovers", handover.path, details),
    ]
    for worker in handover.workers:
        figures = details | worker.figures
        tracks.append((consumer, f"loads of {worker.place}", worker.stages, figures))
        tracks.append((consumer, f"reads of {worker.place}", worker.chunks, figures))
    slices = []
    for (engine, request), track, spans, shown in tracks:
        if spans:
            ordered = _in_order(spans)
            zero_ns = handover.zero_ns
            slices.append(
                _Slice(engine, track, request or "?", zero_ns, shown, ordered)
            )
    if handover.before:
        prefill = slices[0]
        prefill.arrow = {"bind_id": arrow, "flow_out": True}
        for piece in slices:
            # Where clocks contradict each other an arrow would lead back in time, and cannot be drawn.
            is_later = piece.begun_ns >= prefill.begun_ns
            if is_later and piece.track.startswith(("handovers", "loads of ")):
                piece.arrow = {"bind_id": arrow, "flow_in": True}
    return slices


def _in_order(spans: Iterable[Span]) -> list[Span]:
    """Slices must nest: none begins before the previous one ends, as damaged records may say."""
    ordered: list[Span] = []
    free_ms = -math.inf
    for span in sorted(spans, key=lambda span: span.begun_ms):
        begun_ms = max(span.begun_ms, free_ms)
        free_ms = max(span.ended_ms, begun_ms)
        ordered.append(Span(span.phase, begun_ms, free_ms, span.stop_token))
    return ordered


def _details(handover: Handover) -> _Json:
    """The ids of a request in both engines, and what became of it."""
    known = {
        "producer": handover.producer.engine_id,
        "producer_request": handover.producer.request,
        "consumer": handover.consumer.engine_id,
        "consumer_request": handover.consumer.request,
        "lease": str(handover.lease or ""),
        "traceparent": handover.traceparent,
        "tokens": handover.tokens,
        "outcome": outcome_of(handover),
        "total_bytes": handover.bytes,
        "missing": ", ".join(missing_parts(handover)),
    }
    return {name: value for name, value in known.items() if value}
