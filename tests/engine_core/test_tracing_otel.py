"""Spans of two engines in one trace, made by OpenTelemetry's own SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed"
)

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.worker.loads.results import Stage
from tests.harness.core.scheduler import tokens

pytestmark = pytest.mark.slow

PROMPT = tokens(100)
TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
ON = {"otlp_endpoint": "http://127.0.0.1:9/v1/traces"}
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """A tracer provider as vLLM makes one in the processes of an engine."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def hand_over(make: Any, headers: dict[str, str] | None, **shape: Any) -> None:
    producer, consumer = make("kv_producer", **shape), make("kv_consumer", **shape)
    params = producer.prefill("p", PROMPT, trace_headers=headers)
    consumer.engine.add("d", PROMPT, params, max_tokens=3, trace_headers=headers)
    consumer.answer("d")
    producer.until(lambda: producer.engine.is_whole)
    producer.close()
    consumer.close()


def by_name(exported: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exported.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


@pytest.mark.parametrize("shape", [{}, {"tp": 2}], ids=["one worker", "two workers"])
def test_both_engines_spans_are_children_of_the_requests_span(
    make: Any, exported: InMemorySpanExporter, shape: dict[str, Any]
) -> None:
    hand_over(make, HEADERS, **ON, **shape)
    spans = by_name(exported)
    (lease,), (handover,), (wait,) = (
        spans["kvferry.lease"],
        spans["kvferry.handover"],
        spans["kvferry.handover.wait"],
    )
    for root in (lease, handover):
        assert root.parent is not None
        assert (root.parent.trace_id, root.parent.span_id) == (TRACE, PARENT)
        assert root.context.trace_id == TRACE
    assert lease.attributes is not None
    assert handover.attributes is not None
    assert lease.attributes["kvferry.lease"] == handover.attributes["kvferry.lease"]
    assert (
        lease.attributes["kvferry.how"],
        handover.attributes["kvferry.outcome"],
    ) == (
        "done",
        "loaded",
    )
    loads = spans["kvferry.load"]
    workers = shape.get("tp", 1)
    assert {(load.attributes or {})["kvferry.worker"] for load in loads} == set(
        range(workers)
    )
    for child in (wait, *loads):
        assert child.parent == handover.context
    for stage in Stage:
        assert len(spans[f"kvferry.load.{stage.value}"]) == workers


def test_without_a_trace_of_the_requests_each_engine_begins_one(
    make: Any, exported: InMemorySpanExporter
) -> None:
    hand_over(make, None, **ON)
    spans = by_name(exported)
    (lease,), (handover,) = spans["kvferry.lease"], spans["kvferry.handover"]
    assert (lease.parent, handover.parent) == (None, None)
    assert lease.context.trace_id != handover.context.trace_id


def test_an_engine_without_an_endpoint_makes_no_spans(
    make: Any, exported: InMemorySpanExporter, tmp_path: Path
) -> None:
    hand_over(make, HEADERS, extra={"trace_dir": str(tmp_path)})
    assert exported.get_finished_spans() == ()
