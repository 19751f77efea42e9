"""Spans from events: their tree, times, outcome and parents."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvferry.connector.tracing.spans import RootSpan, Span, SpanBuilder, SpanItem, WorkerLoads
from kvferry.trace.events import (
    DecodeArrived,
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
    StageSpan,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LEASE = LeaseName(boot="0" * 32, epoch="1" * 15)
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
STAGES = (StageSpan(stage="queued", begun_ns=21, ended_ns=25), StageSpan(stage="reading", begun_ns=25, ended_ns=40))
LOAD = LoadEnded(at_ns=40, request="d", producer="P", stages=STAGES, bytes=7, descriptors=2)
NAMES: dict[str, str | int] = {"kvferry.request_id": "d", "kvferry.lease": f"{LEASE.boot}/{LEASE.epoch}"}


def reported(worker: int, *loads: LoadEnded) -> WorkerLoads:
    """As a worker sends it."""
    return WorkerLoads(worker, loads)


def spans_of(*items: SpanItem, builder: SpanBuilder | None = None) -> list[RootSpan]:
    builder = builder or SpanBuilder()
    return [root for item in items for root in builder.take(item)]


def outcome_of(items: Sequence[SpanItem]) -> tuple[object, str, int]:
    (root,) = spans_of(*items)
    return root.span.attributes["kvferry.outcome"], root.span.failure, root.span.ended_ns


def test_a_lease_has_the_time_of_its_prefill_and_the_time_it_was_held() -> None:
    (root,) = spans_of(
        PrefillArrived(at_ns=1, request="p", tokens=100, traceparent=PARENT),
        PrefillScheduled(at_ns=2, request="p", lease=LEASE),
        ParamsGiven(at_ns=5, request="p", lease=LEASE, tokens=100),
        LeaseOver(at_ns=9, request="p", lease=LEASE, how="done"),
    )
    attributes: dict[str, str | int] = {
        **NAMES,
        "kvferry.request_id": "p",
        "kvferry.how": "done",
        "kvferry.tokens": 100,
    }
    inside = (Span("kvferry.lease.prefill", 2, 5), Span("kvferry.lease.held", 5, 9))
    assert root == RootSpan(PARENT, Span("kvferry.lease", 2, 9, attributes, inside))


def test_a_lease_that_was_never_held_has_no_parts() -> None:
    (root,) = spans_of(
        PrefillScheduled(at_ns=2, request="p", lease=LEASE),
        LeaseOver(at_ns=9, request="p", lease=LEASE, how="abandoned"),
    )
    assert (root.traceparent, root.span.children, root.span.attributes["kvferry.how"]) == ("", (), "abandoned")


def test_a_turns_lease_belongs_to_the_trace_of_the_request_that_was_decoded() -> None:
    (root,) = spans_of(
        ARRIVED,
        PrefillScheduled(at_ns=12, request="d", lease=LeaseName(boot="2" * 32, epoch="3" * 15)),
        LeaseOver(at_ns=99, request="d", lease=LeaseName(boot="2" * 32, epoch="3" * 15), how="evicted"),
    )
    assert (root.traceparent, root.span.name) == (PARENT, "kvferry.lease")


def test_a_handover_has_its_wait_and_the_stages_of_every_worker() -> None:
    (root,) = spans_of(
        ARRIVED, ORDERED, reported(0, LOAD), reported(1, LOAD), LoadReported(at_ns=50, request="d", good=True)
    )
    attributes: dict[str, str | int] = {
        **NAMES,
        "kvferry.outcome": "loaded",
        "kvferry.producer": "P",
        "kvferry.remote_request_id": "p",
        "kvferry.tokens": 100,
    }
    stages = (Span("kvferry.load.queued", 21, 25), Span("kvferry.load.reading", 25, 40))
    moved: dict[str, str | int] = {"kvferry.bytes": 7, "kvferry.descriptors": 2, "kvferry.staged_bytes": 0}
    loads = [Span("kvferry.load", 21, 40, {"kvferry.worker": worker, **moved}, stages) for worker in (0, 1)]
    inside = (Span("kvferry.handover.wait", 10, 20), *loads)
    assert root == RootSpan(PARENT, Span("kvferry.handover", 10, 50, attributes, inside))


FINISHED = Finished(at_ns=30, request="d")
OUTCOMES: dict[str, tuple[list[SpanItem], tuple[str, str, int]]] = {
    "failed": ([ARRIVED, ORDERED, LoadReported(at_ns=50, request="d", good=False)], ("failed", "failed", 50)),
    "failed, and its request with it": (
        [ARRIVED, ORDERED, FINISHED, LoadReported(at_ns=50, request="d", good=False)],
        ("failed", "failed", 50),
    ),
    "aborted": ([ARRIVED, ORDERED, FINISHED, LoadReported(at_ns=50, request="d", good=True)], ("aborted", "", 50)),
    "not loaded": ([ARRIVED, FINISHED], ("not loaded", "", 30)),
    "recomputed": ([ARRIVED, Recomputed(at_ns=12, request="d", reason="reset")], ("recomputed: reset", "", 12)),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_end_of_a_handover_is_reported(name: str) -> None:
    items, expected = OUTCOMES[name]
    assert outcome_of(items) == expected


def test_a_load_that_failed_carries_its_reason() -> None:
    failed = LoadEnded(at_ns=40, request="d", producer="P", stages=STAGES, reason="fence")
    (root,) = spans_of(ARRIVED, ORDERED, reported(0, failed), LoadReported(at_ns=50, request="d", good=False))
    assert root.span.children[1].failure == "fence"


def test_an_event_without_its_beginning_makes_no_span() -> None:
    over = LeaseOver(at_ns=9, request="p", lease=LEASE, how="done")
    assert spans_of(ORDERED, reported(0, LOAD), LoadReported(at_ns=50, request="d", good=True), FINISHED, over) == []


def test_the_oldest_open_entries_are_dropped_beyond_the_limit() -> None:
    builder = SpanBuilder(most_open=2)
    for number in range(5):
        spans_of(PrefillArrived(at_ns=number, request=f"p{number}", tokens=1, traceparent=PARENT), builder=builder)
        lease = LeaseName(boot="0" * 32, epoch=f"{number + 1:015x}")
        spans_of(PrefillScheduled(at_ns=number, request=f"p{number}", lease=lease), builder=builder)
    ended = [
        spans_of(
            LeaseOver(
                at_ns=9, request=f"p{number}", lease=LeaseName(boot="0" * 32, epoch=f"{number + 1:015x}"), how="done"
            ),
            builder=builder,
        )
        for number in range(5)
    ]
    assert [len(roots) for roots in ended] == [0, 0, 0, 1, 1]
    assert ended[4][0].traceparent == PARENT
