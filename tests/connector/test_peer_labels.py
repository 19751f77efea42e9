"""Labels of producers in metrics: only after a good load, at most `max_peer_labels`, and of plain characters."""

from __future__ import annotations

import functools
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from kvferry.connector.metrics import prometheus as metrics
from kvferry.connector.metrics.stats import PeerLabels
from kvferry.connector.metrics.tables import OTHER_PEERS
from kvferry.worker.peers.peer import PeerKey
from tests.harness.core.configs import vllm_config


def peer(
    host: str, port: int = 5600, engine_id: str = "e", boot: str = "0" * 32
) -> PeerKey:
    return PeerKey(host, port, engine_id, boot)


def test_the_first_producers_have_names_and_keep_them() -> None:
    labels = PeerLabels(2)
    assert [
        labels.label_of(peer(host), is_good=True) for host in ("a", "b", "c", "b", "a")
    ] == [
        "a:5600",
        "b:5600",
        OTHER_PEERS,
        "b:5600",
        "a:5600",
    ]
    assert labels.label_of(peer("a"), is_good=False) == "a:5600"


def test_a_producer_without_a_good_load_has_no_label_and_takes_up_none() -> None:
    labels = PeerLabels(1)
    assert {
        labels.label_of(peer(f"made-up-{number}"), is_good=False)
        for number in range(100)
    } == {OTHER_PEERS}
    assert labels.label_of(peer("real"), is_good=True) == "real:5600"


@given(
    st.lists(
        st.tuples(st.text(max_size=300), st.integers(1, 65535), st.booleans()),
        max_size=20,
    ),
    st.integers(0, 4),
)
def test_a_label_is_short_plain_and_one_of_few(
    loads: list[tuple[str, int, bool]], most: int
) -> None:
    labels = PeerLabels(most)
    found = {
        labels.label_of(peer(host, port), is_good=is_good)
        for host, port, is_good in loads
    } - {OTHER_PEERS}
    assert len(found) <= most
    assert all(re.fullmatch(r"[A-Za-z0-9.:_\-]{1,128}", label) for label in found)


def test_the_front_end_makes_no_more_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "MAX_PEER_LABELS", 2)
    registry = CollectorRegistry()
    types = {
        kind: functools.partial(kind, registry=registry)
        for kind in (Counter, Gauge, Histogram)
    }
    config = vllm_config("NixlConnector", module="kvferry.connector")
    made = metrics.FerryPromMetrics(config, types, ["engine"], {0: ["0"]})
    for host in ("a", "b", "c", "d", "a"):
        made.observe({"counters": {"peer_loads": {host: 1}}})
    reported = {
        label: registry.get_sample_value(
            "vllm:kvferry_peer_loads_total", {"engine": "0", "peer": label}
        )
        for label in ("a", "b", "c", OTHER_PEERS)
    }
    assert reported == {"a": 2, "b": 1, "c": None, OTHER_PEERS: 2}
    made.observe({"counters": {"peer_loads": {"a": 1}}}, 7)
    assert b'engine="7"' not in generate_latest(registry)
