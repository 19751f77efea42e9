"""Statistics on their way from a step to `/metrics`: added up, sent and observed."""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as PromCounter
from prometheus_client import Histogram as PromHistogram

from kvferry.connector.connector import FerryConnector
from kvferry.connector.metrics.prometheus import FerryPromMetrics
from kvferry.connector.metrics.stats import FerryStats, PeerLabels
from kvferry.connector.metrics.tables import (
    COUNTERS,
    HISTOGRAMS,
    PREFIX_REASONS,
    RECOMPUTE_REASONS,
    RELEASE_WAYS,
)
from kvferry.link.counters import CounterKey
from kvferry.protocol.orders import FailureReason
from kvferry.scheduler.requests import LeaseUse
from kvferry.worker.loads.results import LoadRecord, Stage, StepResults
from kvferry.worker.peers.peer import PeerKey
from tests.connector.step_stats import step_stats
from tests.engine_core.step_count import StepCount
from tests.harness.core.configs import vllm_config

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = PeerKey("host", 1, "engine", "0" * 32)


def record(
    reason: FailureReason | None = None, staged_bytes: int = 0, early_bytes: int = 0
) -> LoadRecord:
    """A load of 1 s, 2 s, 4 s, 8 s, 16 s and 32 s, by stage."""
    made = LoadRecord(
        request_id="r",
        source=SOURCE,
        ordered_s=100.0,
        reason=reason,
        planned_bytes=100,
        planned_descriptors=9,
        transferred_bytes=90,
        descriptors=3,
        post_s=0.25,
        transfer_s=0.5,
        staged_bytes=staged_bytes,
        relayout_s=0.125,
        early_bytes=early_bytes,
    )
    for stage, now_s in zip(
        [*Stage][1:], (101.0, 103.0, 107.0, 115.0, 131.0), strict=True
    ):
        made.go_on(stage, now_s)
    made.end(163.0)
    return made


FAULTS = [reason for reason in FailureReason if reason is not FailureReason.ABORTED]
COUNTED = {
    "failed_notifications": 2,
    "bad_notifications": 3,
    "late_notifications": 4,
    "quarantined_loads": 5,
    "quarantined_blocks": 6,
    "graces_over": 7,
    "lost_orders": 8,
}
EVERYTHING = StepResults(
    failed={reason.value: reason for reason in FailureReason},
    load_records=[
        record(early_bytes=70),
        record(staged_bytes=40),
        record(FailureReason.FENCE, 9, 9),
        record(FailureReason.ABORTED, 9, 9),
    ],
    handshake_s=[0.25, 0.5],
    counts=Counter(COUNTED),
)

keys = st.tuples(st.sampled_from("abc"), st.sampled_from(("", "x", "y")))
counts = st.dictionaries(keys, st.integers(1, 9), max_size=4)
samples = st.dictionaries(
    st.sampled_from("pq"), st.lists(st.floats(0, 9), min_size=1, max_size=3), max_size=2
)


def stats(
    counted: dict[CounterKey, int], sampled: dict[str, list[float]] | None = None
) -> FerryStats:
    return step_stats(counted, sampled or {}, {})


def counters_of(of: FerryStats) -> dict[CounterKey, int]:
    found = {}
    for name, by_label in of.data.get("counters", {}).items():
        found.update({(name, label): amount for label, amount in by_label.items()})
    return found


@given(st.lists(st.tuples(counts, samples), max_size=4))
def test_an_interval_is_the_sum_of_its_steps(
    steps: list[tuple[dict[CounterKey, int], dict[str, list[float]]]],
) -> None:
    whole = FerryStats()
    parts = [stats(*step) for step in steps]
    before = pickle.dumps([part.data for part in parts])
    expected: Counter[CounterKey] = Counter()
    values: dict[str, list[float]] = {}
    for (counted, sampled), part in zip(steps, parts, strict=True):
        assert whole.aggregate(part) is whole
        expected.update(counted)
        for name, more in sampled.items():
            values.setdefault(name, []).extend(more)
    assert counters_of(whole) == dict(expected)
    assert whole.data.get("samples", {}) == values
    assert whole.is_empty() == (not expected and not values)
    assert pickle.dumps([part.data for part in parts]) == before, (
        "what is added is not changed"
    )


def test_statistics_survive_both_of_vllms_ways_between_processes() -> None:
    reported = FerryStats.from_results(EVERYTHING, PeerLabels(8))
    assert reported is not None
    assert pickle.loads(pickle.dumps(reported)) == reported  # noqa: S301 - our own bytes
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(reported.to_dict()))
    assert FerryConnector.build_kv_connector_stats(sent) == reported
    assert FerryConnector.build_kv_connector_stats().is_empty()


def test_of_a_gauge_the_latest_word_counts_and_the_log_gets_it(
    registry: Registry,
) -> None:
    whole = FerryStats()
    for blocks in (3.0, 9.0, 4.0):
        reported = step_stats({}, {}, {"quarantined_blocks_now": blocks})
        assert not reported.is_empty()
        registry.metrics.observe(reported.to_dict(), 1)
        whole.aggregate(reported)
    assert whole.reduce() == {"quarantined_blocks_now": 4.0}
    assert registry.value("kvferry_quarantined_blocks_now", 1) == 4.0
    assert registry.value("kvferry_quarantined_blocks_now", 0) == 0.0
    registry.metrics.observe({"gauges": {"of a newer worker": 1.0}}, 1)


def test_a_load_costs_the_step_little() -> None:
    labels, counted = PeerLabels(8), StepCount()
    step = SimpleNamespace(tell=FerryStats.from_results)
    counted.wrap(step, ["tell"])
    nothing = counted.median(lambda: step.tell(StepResults(), labels), 3)
    one = counted.median(
        lambda: step.tell(StepResults(load_records=[record()]), labels), 3
    )
    assert 0 < nothing < 100
    assert one < 900, "instructions on the thread that launches forward passes"


def test_a_workers_step_counts_its_failures_notifications_bytes_and_times() -> None:
    reported = FerryStats.from_results(EVERYTHING, PeerLabels(8))
    assert reported is not None
    assert counters_of(reported) == {
        **{("failed_loads", reason.value): 1 for reason in FAULTS},
        ("failed_transfers", ""): len(FAULTS),
        ("aborted_loads", ""): 1,
        **{(name, ""): amount for name, amount in COUNTED.items()},
        ("planned_bytes", ""): 200,
        ("planned_descriptors", ""): 18,
        ("staged_bytes", ""): 40,
        ("early_bytes", ""): 70,
        ("placed_loads", "direct"): 1,
        ("placed_loads", "mixed"): 1,
        ("peer_loads", "host:1"): 2,
        ("peer_bytes", "host:1"): 200,
        ("peer_load_s", "host:1"): 126.0,
        ("peer_failed_loads", "host:1"): 1,
    }
    assert reported.data["samples"] == {
        "transfer_s": [0.5, 0.5],
        "post_s": [0.25, 0.25],
        "transferred_bytes": [90.0, 90.0],
        "descriptors": [3.0, 3.0],
        "run_bytes": [30.0, 30.0],
        "load_s": [63.0, 63.0],
        "queue_s": [1.0, 1.0],
        "connecting_s": [2.0, 2.0],
        "fence_s": [4.0, 4.0],
        "read_s": [24.0, 24.0],
        "relayout_s": [0.125],
        "handshake_s": [0.25, 0.5],
    }


class Registry:
    """The metrics of two engines, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: functools.partial(kind, registry=self.registry)
            for kind in (PromCounter, Gauge, PromHistogram)
        }
        config = vllm_config("NixlConnector", module="kvferry.connector")
        self.metrics = FerryPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})

    def value(self, name: str, engine: int = 0, **labels: str) -> Any:
        return self.registry.get_sample_value(
            f"vllm:{name}", {"engine": str(engine), **labels}
        )


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_every_counter_and_label_is_there_from_the_start_at_zero(
    registry: Registry,
) -> None:
    for spec in COUNTERS.values():
        for label in spec.values or ("",):
            labels = {spec.label: label} if spec.label else {}
            assert registry.value(f"{spec.exported}_total", 0, **labels) == 0
    for shape in HISTOGRAMS.values():
        assert registry.value(f"{shape.exported}_count") == 0


def test_every_reason_of_a_failed_load_reaches_its_own_label(
    registry: Registry,
) -> None:
    reported = FerryStats.from_results(EVERYTHING, PeerLabels(8))
    assert reported is not None
    registry.metrics.observe(reported.to_dict(), 1)
    for reason in FAULTS:
        assert registry.value("kvferry_failed_loads_total", 1, reason=reason.value) == 1
        assert registry.value("kvferry_failed_loads_total", 0, reason=reason.value) == 0
    assert registry.value("nixl_bytes_transferred_sum", 1) == 180
    assert registry.value("nixl_num_descriptors_count", 1) == 2


def test_an_expired_lease_is_counted_under_the_peers_name_too(
    registry: Registry,
) -> None:
    registry.metrics.observe(
        stats(
            {("leases_released", "expired"): 2, ("leases_released", "done"): 5}
        ).to_dict()
    )
    assert registry.value("nixl_num_kv_expired_reqs_total") == 2
    assert registry.value("kvferry_leases_released_total", how="done") == 5


def test_an_engine_that_is_not_known_is_left_out(registry: Registry) -> None:
    registry.metrics.observe(
        stats(
            {("leases_released", "expired"): 1, ("loads", ""): 1}, {"load_s": [1.0]}
        ).to_dict(),
        7,
    )
    assert registry.value("kvferry_loads_total") == 0


# The source says what is counted, the tables what is exported. `tests.harness.core.scheduler` checks every step too.

SOURCES = "".join(
    file.read_text()
    for package in ("link", "scheduler", "worker", "connector")
    for file in sorted((REPOSITORY / package / "kvferry").rglob("*.py"))
    if file.name != "tables.py"
)
BY_USE = {
    f"{use.value}_{event}"
    for use in LeaseUse
    for event in ("opened", "refused", "released")
}
"""Counters whose name begins with what a lease is for."""


def test_every_exported_counter_and_label_is_counted_somewhere() -> None:
    """Otherwise it would always be zero."""
    labels = {*RECOMPUTE_REASONS, *RELEASE_WAYS, *PREFIX_REASONS}
    assert not [
        name for name in {*COUNTERS, *labels} - BY_USE if f'"{name}"' not in SOURCES
    ]
    assert set(COUNTERS) >= BY_USE
    assert {
        reason
        for reason in FailureReason.__members__
        if f"FailureReason.{reason}" not in SOURCES
    } == set()
