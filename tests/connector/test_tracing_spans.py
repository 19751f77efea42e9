"""Spans from events, made by OpenTelemetry's SDK: their tree, times, outcome and parents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest

pytest.importorskip(
    "opentelemetry.sdk", reason="the OpenTelemetry SDK is not installed"
)

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.connector.tracing.spans import MAX_OPEN, SpanItem, SpanSink, WorkerLoads
from kvferry.trace.events import (
    DecodeArrived,
    Finished,
    LeaseOver,
    LoadEnded,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Phase,
    PrefillArrived,
    PrefillScheduled,
    Recomputed,
    StageSpan,
    TracedLease,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PARENT_ID = 0xB7AD6B7169203331
LEASE = TracedLease(boot="0" * 32, epoch="1" * 15)
ARRIVED = DecodeArrived(
    at_ns=10,
    request="d",
    lease=LEASE,
    producer="P",
    remote_request="p",
    tokens=100,
    traceparent=PARENT,
)
ORDERED = LoadOrdered(at_ns=20, request="d", first_token=0, stop_token=100)
STAGES = (
    StageSpan(stage=Phase.QUEUED, begun_ns=21, ended_ns=25),
    StageSpan(stage=Phase.READING, begun_ns=25, ended_ns=40),
)
LOAD = LoadEnded(
    at_ns=40,
    request="d",
    producer="P",
    stages=STAGES,
    bytes=7,
    descriptors=2,
    early_bytes=3,
)
NAMES: dict[str, str | int] = {
    "kvferry.request_id": "d",
    "kvferry.lease": f"{LEASE.boot}/{LEASE.epoch}",
}


def reported(worker: int, *loads: LoadEnded) -> WorkerLoads:
    """As a worker sends it."""
    return WorkerLoads(worker, loads)


class Made(NamedTuple):
    """A span, with the name or the id of its parent."""

    name: str
    parent: str | int | None
    begun_ns: int | None
    ended_ns: int | None


def spans_of(*items: SpanItem, max_open: int = MAX_OPEN) -> list[ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    SpanSink(provider.get_tracer("test"), max_open).take(items, 0)
    return list(exporter.get_finished_spans())


def tree_of(spans: list[ReadableSpan]) -> list[Made]:
    """The spans in the order of their making."""
    names: dict[int, str] = {span.context.span_id: span.name for span in spans}
    parents = [None if span.parent is None else span.parent.span_id for span in spans]
    return [
        Made(
            span.name,
            parent and names.get(parent, parent),
            span.start_time,
            span.end_time,
        )
        for span, parent in zip(spans, parents, strict=True)
    ]


def attributes_of(span: ReadableSpan) -> Mapping[str, object]:
    return dict(span.attributes or {})


def test_a_lease_has_the_time_of_its_prefill_and_the_time_it_was_held() -> None:
    spans = spans_of(
        PrefillArrived(at_ns=1, request="p", tokens=100, traceparent=PARENT),
        PrefillScheduled(at_ns=2, request="p", lease=LEASE),
        ParamsGiven(at_ns=5, request="p", lease=LEASE, tokens=100),
        LeaseOver(at_ns=9, request="p", lease=LEASE, how="done"),
    )
    assert tree_of(spans) == [
        ("kvferry.lease", PARENT_ID, 2, 9),
        ("kvferry.lease.prefill", "kvferry.lease", 2, 5),
        ("kvferry.lease.held", "kvferry.lease", 5, 9),
    ]
    own = {"kvferry.request_id": "p", "kvferry.how": "done", "kvferry.tokens": 100}
    assert attributes_of(spans[0]) == {**NAMES, **own}


@pytest.mark.parametrize("traceparent", ["", "00-nonsense"])
def test_a_lease_that_was_never_held_has_no_parts_and_without_a_trace_begins_one(
    traceparent: str,
) -> None:
    (root,) = spans_of(
        PrefillArrived(at_ns=1, request="p", tokens=100, traceparent=traceparent),
        PrefillScheduled(at_ns=2, request="p", lease=LEASE),
        LeaseOver(at_ns=9, request="p", lease=LEASE, how="abandoned"),
    )
    assert (root.parent, attributes_of(root)["kvferry.how"]) == (None, "abandoned")


def test_a_turns_lease_belongs_to_the_trace_of_the_request_that_was_decoded() -> None:
    (root,) = spans_of(
        ARRIVED,
        PrefillScheduled(
            at_ns=12, request="d", lease=TracedLease(boot="2" * 32, epoch="3" * 15)
        ),
        LeaseOver(
            at_ns=99,
            request="d",
            lease=TracedLease(boot="2" * 32, epoch="3" * 15),
            how="evicted",
        ),
    )
    assert tree_of([root]) == [("kvferry.lease", PARENT_ID, 12, 99)]


def test_a_handover_has_its_wait_and_the_stages_of_every_worker() -> None:
    spans = spans_of(
        ARRIVED,
        ORDERED,
        reported(0, LOAD),
        reported(1, LOAD),
        LoadReported(at_ns=50, request="d", good=True),
    )
    load = [
        ("kvferry.load", "kvferry.handover", 21, 40),
        ("kvferry.load.queued", "kvferry.load", 21, 25),
        ("kvferry.load.reading", "kvferry.load", 25, 40),
    ]
    handover = ("kvferry.handover", PARENT_ID, 10, 50)
    assert tree_of(spans) == [
        handover,
        ("kvferry.handover.wait", "kvferry.handover", 10, 20),
        *load,
        *load,
    ]
    assert attributes_of(spans[0]) == {
        **NAMES,
        "kvferry.outcome": "loaded",
        "kvferry.producer": "P",
        "kvferry.remote_request_id": "p",
        "kvferry.tokens": 100,
    }
    moved = {
        "kvferry.bytes": 7,
        "kvferry.descriptors": 2,
        "kvferry.staged_bytes": 0,
        "kvferry.mapped_bytes": 0,
        "kvferry.early_bytes": 3,
    }
    for worker, first in ((0, 2), (1, 5)):
        made, *stages = spans[first : first + 3]
        assert attributes_of(made) == {"kvferry.worker": worker, **moved}
        assert [stage.parent and stage.parent.span_id for stage in stages] == [
            made.context.span_id
        ] * 2
    assert {span.status.is_ok for span in spans} == {True}


FINISHED = Finished(at_ns=30, request="d")
OUTCOMES: dict[str, tuple[list[SpanItem], tuple[str, str, int]]] = {
    "failed": (
        [ARRIVED, ORDERED, LoadReported(at_ns=50, request="d", good=False)],
        ("failed", "failed", 50),
    ),
    "failed, and its request with it": (
        [ARRIVED, ORDERED, FINISHED, LoadReported(at_ns=50, request="d", good=False)],
        ("failed", "failed", 50),
    ),
    "aborted": (
        [ARRIVED, ORDERED, FINISHED, LoadReported(at_ns=50, request="d", good=True)],
        ("aborted", "", 50),
    ),
    "not loaded": ([ARRIVED, FINISHED], ("not loaded", "", 30)),
    "recomputed": (
        [ARRIVED, Recomputed(at_ns=12, request="d", reason="reset")],
        ("recomputed: reset", "", 12),
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_end_of_a_handover_is_reported(name: str) -> None:
    items, (outcome, failure, ended_ns) = OUTCOMES[name]
    root = spans_of(*items)[0]
    assert (attributes_of(root)["kvferry.outcome"], root.status.description or "") == (
        outcome,
        failure,
    )
    assert (root.status.is_ok, root.end_time) == (not failure, ended_ns)


def test_an_event_without_its_beginning_makes_no_span() -> None:
    over = LeaseOver(at_ns=9, request="p", lease=LEASE, how="done")
    assert (
        spans_of(
            ORDERED,
            reported(0, LOAD),
            LoadReported(at_ns=50, request="d", good=True),
            FINISHED,
            over,
        )
        == []
    )


def test_the_oldest_open_entries_are_dropped_beyond_the_limit() -> None:
    leases = {
        f"p{number}": TracedLease(boot="0" * 32, epoch=f"{number + 1:015x}")
        for number in range(5)
    }
    begun: list[SpanItem] = []
    for request, lease in leases.items():
        begun.append(
            PrefillArrived(at_ns=1, request=request, tokens=1, traceparent=PARENT)
        )
        begun.append(PrefillScheduled(at_ns=2, request=request, lease=lease))
    ended = [
        LeaseOver(at_ns=9, request=request, lease=lease, how="done")
        for request, lease in leases.items()
    ]
    spans = spans_of(*begun, *ended, max_open=2)
    assert [attributes_of(span)["kvferry.request_id"] for span in spans] == ["p3", "p4"]
    assert [made.parent for made in tree_of(spans)] == [PARENT_ID] * 2
