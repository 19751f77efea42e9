"""Spans from the events of one engine's scheduler. They go to the tracer provider that vLLM has created in this process
if OpenTelemetry is on. The tree of spans:

kvferry.lease       on the producer, from the allocation of its slot until the lease ends
├── kvferry.lease.prefill
└── kvferry.lease.held
kvferry.handover    on the consumer, from the request's arrival until all workers have reported
├── kvferry.handover.wait            until the load is ordered
└── kvferry.load                     one for each worker that reported its load
    └── kvferry.load.reading, …      the load's stages
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.trace.events import (
    DecodeArrived,
    Event,
    Finished,
    LeaseName,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillArrived,
    PrefillScheduled,
    Recomputed,
)

MOST_OPEN = 1 << 16
"""Requests and leases that are open at once; above it the oldest ones are dropped."""

Attribute = str | int
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class WorkerLoads:
    """Ended loads of one worker."""

    worker: int
    loads: Sequence[LoadEnded]


SpanItem = Event | WorkerLoads


@dataclass(frozen=True, slots=True)
class Span:
    """A span; times are nanoseconds since the epoch.

    Attributes:
        failure: the reason of a failure; empty if it succeeded.
    """

    name: str
    begun_ns: int
    ended_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class RootSpan:
    """A span and its parent: `traceparent` in W3C format, empty for the first span of a trace."""

    traceparent: str
    span: Span


@dataclass(slots=True)
class _OpenLease:
    scheduled: PrefillScheduled
    params: ParamsGiven | None = None


@dataclass(slots=True)
class _OpenHandover:
    arrived: DecodeArrived
    ordered_ns: int = 0
    is_aborted: bool = False
    loads: list[tuple[int, LoadEnded]] = field(default_factory=list)


class SpanBuilder:
    """The open leases and handovers of one engine. Events must come in order."""

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self._traceparents: dict[str, str] = {}
        self._leases: dict[LeaseName, _OpenLease] = {}
        self._handovers: dict[str, _OpenHandover] = {}

    def take(self, item: SpanItem) -> Iterator[RootSpan]:
        """The spans that end with this item."""
        match item:
            case PrefillArrived():
                self._keep(self._traceparents, item.request, item.traceparent)
            case PrefillScheduled():
                self._keep(self._leases, item.lease, _OpenLease(item))
            case ParamsGiven() if item.lease in self._leases:
                self._leases[item.lease].params = item
            case LeaseOver() if item.lease in self._leases:
                opened = self._leases.pop(item.lease)
                yield RootSpan(self._traceparents.get(item.request, ""), _lease_span(opened, item))
            case DecodeArrived():
                self._keep(self._traceparents, item.request, item.traceparent)
                self._keep(self._handovers, item.request, _OpenHandover(item))
            case LoadOrdered() if item.request in self._handovers:
                self._handovers[item.request].ordered_ns = item.at_ns
            case WorkerLoads():
                for load in item.loads:
                    if load.request in self._handovers:
                        self._handovers[load.request].loads.append((item.worker, load))
            case LoadReported() if item.request in self._handovers:
                outcome = "loaded" if item.good else "failed"
                yield self._end_handover(item.request, item.at_ns, outcome, "" if item.good else outcome)
            case Recomputed() if item.request in self._handovers:
                yield self._end_handover(item.request, item.at_ns, f"recomputed: {item.reason}")
            case Finished() if item.request in self._handovers:
                if self._handovers[item.request].ordered_ns:
                    self._handovers[item.request].is_aborted = True  # its workers have not reported yet
                else:
                    yield self._end_handover(item.request, item.at_ns, "not loaded")
            case _:
                pass

    def _end_handover(self, request: str, at_ns: int, outcome: str, failure: str = "") -> RootSpan:
        opened = self._handovers.pop(request)
        outcome = "aborted" if opened.is_aborted and not failure else outcome  # vLLM ends a failed request first
        return RootSpan(opened.arrived.traceparent, _handover_span(opened, at_ns, outcome, failure))

    def _keep(self, kept: dict[Key, Value], key: Key, value: Value) -> None:
        kept[key] = value
        if len(kept) > self._most_open:
            del kept[next(iter(kept))]


def _lease_span(opened: _OpenLease, over: LeaseOver) -> Span:
    begun_ns, params = opened.scheduled.at_ns, opened.params
    attributes: dict[str, Attribute] = {**_names(over.request, over.lease), "kvferry.how": over.how}
    if params is None:
        return Span("kvferry.lease", begun_ns, over.at_ns, attributes)
    children = (
        Span("kvferry.lease.prefill", begun_ns, params.at_ns),
        Span("kvferry.lease.held", params.at_ns, over.at_ns),
    )
    return Span("kvferry.lease", begun_ns, over.at_ns, {**attributes, "kvferry.tokens": params.tokens}, children)


def _handover_span(opened: _OpenHandover, ended_ns: int, outcome: str, failure: str) -> Span:
    arrived, ordered_ns = opened.arrived, opened.ordered_ns
    attributes: dict[str, Attribute] = {
        **_names(arrived.request, arrived.lease),
        "kvferry.outcome": outcome,
        "kvferry.producer": arrived.producer,
        "kvferry.remote_request_id": arrived.remote_request,
        "kvferry.tokens": arrived.tokens,
    }
    wait = (Span("kvferry.handover.wait", arrived.at_ns, ordered_ns),) if ordered_ns else ()
    loads = tuple(_load_span(worker, load) for worker, load in opened.loads if load.stages)
    return Span("kvferry.handover", arrived.at_ns, ended_ns, attributes, (*wait, *loads), failure)


def _load_span(worker: int, load: LoadEnded) -> Span:
    stages = tuple(Span(f"kvferry.load.{one.stage}", one.begun_ns, one.ended_ns) for one in load.stages)
    attributes: dict[str, Attribute] = {
        "kvferry.worker": worker,
        "kvferry.bytes": load.bytes,
        "kvferry.descriptors": load.descriptors,
        "kvferry.staged_bytes": load.staged_bytes,
    }
    return Span("kvferry.load", stages[0].begun_ns, stages[-1].ended_ns, attributes, stages, load.reason)


def _names(request: str, lease: LeaseName) -> dict[str, Attribute]:
    return {"kvferry.request_id": request, "kvferry.lease": f"{lease.boot}/{lease.epoch}"}


_FLUSH_MS = 2000


class SpanSink:
    """A recorder's sink that makes spans of its items. The exporter is vLLM's and has its own threads."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._builder = SpanBuilder()
        self._propagator = TraceContextTextMapPropagator()

    def take(self, items: Sequence[SpanItem], lost: int) -> None:
        """Make the spans that end with these items."""
        for item in items:
            for root in self._builder.take(item):
                # An empty context if there is no parent, so that no other span of this process becomes the parent.
                parent = self._propagator.extract({"traceparent": root.traceparent}, Context())
                self._make(root.span, parent, SpanKind.INTERNAL)

    def close(self) -> None:
        """Flush the exporter: a forked engine ends without the hooks that would do it."""
        flush = getattr(trace.get_tracer_provider(), "force_flush", None)
        if flush is not None:
            flush(_FLUSH_MS)

    def _make(self, span: Span, parent: Context, kind: SpanKind) -> None:
        made = self._tracer.start_span(
            span.name, parent, kind, attributes=dict(span.attributes), start_time=span.begun_ns
        )
        if span.failure:
            made.set_status(Status(StatusCode.ERROR, span.failure))
        inside = trace.set_span_in_context(made, Context())
        for child in span.children:
            self._make(child, inside, SpanKind.INTERNAL)
        made.end(span.ended_ns)
