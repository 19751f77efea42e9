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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.trace.events import (
    DecodeArrived,
    Event,
    Finished,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    PrefillArrived,
    PrefillScheduled,
    Recomputed,
    TracedLease,
)

MAX_OPEN = 1 << 16
"""Requests and leases that are open at once; above it the oldest ones are dropped."""

_FLUSH_MS = 2000
_PROPAGATOR = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int]
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class WorkerLoads:
    """Ended loads of one worker."""

    worker: int
    loads: Sequence[LoadEnded]


SpanItem = Event | WorkerLoads


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


class SpanSink:
    """A recorder's sink that makes a span of every lease and handover when it ends. Items must come in order.

    The exporter is vLLM's and has its own threads.
    """

    def __init__(self, tracer: Tracer, max_open: int = MAX_OPEN) -> None:
        self._tracer = tracer
        self._max_open = max_open
        self._traceparents: dict[str, str] = {}
        self._leases: dict[TracedLease, _OpenLease] = {}
        self._handovers: dict[str, _OpenHandover] = {}

    def take(self, items: Sequence[SpanItem], lost: int) -> None:
        """Make the spans that end with these items."""
        for item in items:
            self._take(item)

    def close(self) -> None:
        """Flush the exporter."""
        # A forked engine ends without the hooks that would do it.
        flush = getattr(trace.get_tracer_provider(), "force_flush", None)
        if flush is not None:
            flush(_FLUSH_MS)

    def _take(self, item: SpanItem) -> None:
        match item:
            case PrefillArrived():
                self._keep(self._traceparents, item.request, item.traceparent)
            case PrefillScheduled():
                self._keep(self._leases, item.lease, _OpenLease(item))
            case ParamsGiven() if item.lease in self._leases:
                self._leases[item.lease].params = item
            case LeaseOver() if item.lease in self._leases:
                self._end_lease(item)
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
                if item.good:
                    self._end_handover(item.request, item.at_ns, "loaded")
                else:
                    self._end_handover(
                        item.request, item.at_ns, "failed", failure="failed"
                    )
            case Recomputed() if item.request in self._handovers:
                self._end_handover(
                    item.request, item.at_ns, f"recomputed: {item.reason}"
                )
            case Finished() if item.request in self._handovers:
                handover = self._handovers[item.request]
                if handover.ordered_ns:
                    # Its workers have not reported the load yet: the handover ends when they have.
                    handover.is_aborted = True
                else:
                    self._end_handover(item.request, item.at_ns, "not loaded")
            case _:
                pass

    def _keep(self, kept: dict[Key, Value], key: Key, value: Value) -> None:
        """Keep a value, instead of the oldest one if there are too many."""
        kept[key] = value
        if len(kept) > self._max_open:
            oldest = next(iter(kept))
            del kept[oldest]

    def _end_lease(self, over: LeaseOver) -> None:
        opened = self._leases.pop(over.lease)
        begun_ns = opened.scheduled.at_ns
        attributes = _names(over.request, over.lease)
        attributes["kvferry.how"] = over.how
        if opened.params is not None:
            attributes["kvferry.tokens"] = opened.params.tokens
        parent = _parent(self._traceparents.get(over.request, ""))
        inside = self._make("kvferry.lease", begun_ns, over.at_ns, parent, attributes)
        if opened.params is not None:
            held_ns = opened.params.at_ns
            self._make("kvferry.lease.prefill", begun_ns, held_ns, inside)
            self._make("kvferry.lease.held", held_ns, over.at_ns, inside)

    def _end_handover(
        self, request: str, ended_ns: int, outcome: str, failure: str = ""
    ) -> None:
        """Make the spans of a handover.

        Args:
            failure: why the span has the status of an error; empty if it has not.
        """
        opened = self._handovers.pop(request)
        arrived = opened.arrived
        # A failed request has ended too: vLLM ends it before its load is reported.
        if opened.is_aborted and not failure:
            outcome = "aborted"
        attributes: Attributes = {
            **_names(request, arrived.lease),
            "kvferry.outcome": outcome,
            "kvferry.producer": arrived.producer,
            "kvferry.remote_request_id": arrived.remote_request,
            "kvferry.tokens": arrived.tokens,
        }
        inside = self._make(
            "kvferry.handover",
            arrived.at_ns,
            ended_ns,
            _parent(arrived.traceparent),
            attributes,
            failure,
        )
        if opened.ordered_ns:
            self._make(
                "kvferry.handover.wait", arrived.at_ns, opened.ordered_ns, inside
            )
        for worker, load in opened.loads:
            if load.stages:
                self._make_load(worker, load, inside)

    def _make_load(self, worker: int, load: LoadEnded, parent: Context) -> None:
        attributes: Attributes = {
            "kvferry.worker": worker,
            "kvferry.bytes": load.bytes,
            "kvferry.descriptors": load.descriptors,
            "kvferry.staged_bytes": load.staged_bytes,
            "kvferry.mapped_bytes": load.mapped_bytes,
            "kvferry.early_bytes": load.early_bytes,
        }
        inside = self._make(
            "kvferry.load",
            load.stages[0].begun_ns,
            load.stages[-1].ended_ns,
            parent,
            attributes,
            load.reason,
        )
        for stage in load.stages:
            self._make(
                f"kvferry.load.{stage.stage.value}",
                stage.begun_ns,
                stage.ended_ns,
                inside,
            )

    def _make(
        self,
        name: str,
        begun_ns: int,
        ended_ns: int,
        parent: Context,
        attributes: Attributes | None = None,
        failure: str = "",
    ) -> Context:
        """Make a span; times are nanoseconds since the epoch. Returns the context for the spans inside it."""
        span = self._tracer.start_span(
            name, parent, attributes=attributes, start_time=begun_ns
        )
        if failure:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(ended_ns)
        return trace.set_span_in_context(span, Context())


def _parent(traceparent: str) -> Context:
    """The context of a `traceparent` in W3C format; an empty one if there is none."""
    # Never the current context, or another span of this process would become the parent.
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context())


def _names(request: str, lease: TracedLease) -> dict[str, str | int]:
    return {
        "kvferry.request_id": request,
        "kvferry.lease": f"{lease.boot}/{lease.epoch}",
    }
