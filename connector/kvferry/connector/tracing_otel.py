"""Spans for OpenTelemetry, where vLLM has it on: into the tracer provider that vLLM has made in this process."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.connector.tracing_spans import Span, SpanBook, SpanItem

_FLUSH_MS = 2000


class SpanSink:
    """A recorder's sink: makes spans of what it is given. The exporter is vLLM's, with threads of its own."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._book = SpanBook()
        self._propagator = TraceContextTextMapPropagator()

    def take(self, items: Sequence[SpanItem], lost: int) -> None:
        """Make what ended with these."""
        for item in items:
            for root in self._book.take(item):
                # An empty context where there is no parent, so that nothing else in this process is taken for one.
                parent = self._propagator.extract({"traceparent": root.traceparent}, Context())
                self._make(root.span, parent, SpanKind.INTERNAL)

    def close(self) -> None:
        """Have the exporter send what it has: a forked engine ends without the hooks that would."""
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
