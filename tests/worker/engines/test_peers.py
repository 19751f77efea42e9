"""Producers that cannot be connected, are refused, die, or come back: reported by name, without cost to others."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import msgspec
import pytest

from kvferry.link import limits
from kvferry.link.limits import Backoff
from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.errors import PeerLost
from tests.harness.cache_engine import FACTS, SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.rig import Rig
from tests.promises import promise
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SHORT_TIMEOUT = replace(SETTINGS, handshake_timeout_s=0.2)


def short_backoff(monkeypatch: pytest.MonkeyPatch, first_s: float) -> None:
    monkeypatch.setattr(limits, "AVOID", Backoff(first_s, 30.0))


@pytest.mark.parametrize(
    "host",
    [
        "[::1]",
        "::1",
        "unknown.invalid",
        "*",
        "eth0;1.2.3.4",
        "a b",
        "\N{SNOWMAN}",
        "x" * 500,
    ],
)
def test_a_host_that_is_none_fails_the_load_and_nothing_else(
    rig: Rig, host: str
) -> None:
    producer, consumer = rig.pair(settings=SHORT_TIMEOUT)
    load = consumer.load(
        producer.changed(producer.prefill(tokens=10), remote_host=host)
    )
    assert rig.until_over(consumer, load) is FailureReason.HANDSHAKE
    consumer.set_timeouts()
    rig.transfer(producer, consumer)


def test_a_description_of_another_engine_is_refused_from_any_sender(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    other = msgspec.structs.replace(producer.description, engine_id="Q")
    monkeypatch.setattr(
        "kvferry.worker.peers.first_contact.read_description", lambda *_: other
    )
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.REFUSED
    assert consumer.fabric.calls["add_peer"] == 0


def test_params_that_lead_back_to_the_engine_that_reads_are_refused(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10)
    load = consumer.load(
        producer.changed(offer, remote_engine_id="C", remote_port=consumer.port)
    )
    assert rig.until_over(consumer, load) is FailureReason.REFUSED
    assert consumer.fabric.calls["add_peer"] == 0


def test_two_engines_that_were_given_one_id_hand_over_to_each_other(
    any_rig: Rig,
) -> None:
    """Their boots tell them apart."""
    first, second = any_rig.engine("same"), any_rig.engine("same")
    any_rig.transfer(first, second, seed=1)
    any_rig.transfer(second, first, seed=2)


def test_two_producers_that_were_given_one_id_are_both_kept(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, consumer = rig.engine("same"), rig.engine("same"), rig.engine("C")
    for turn in range(4):
        for producer in (first, second):
            rig.transfer(producer, consumer, seed=turn)
    assert [
        producer.counters.total("handshakes_served") for producer in (first, second)
    ] == [1, 1]
    assert caplog.text.count("has the engine id of") == 1


@promise(4)
def test_an_engine_that_restarted_is_connected_anew_and_its_former_life_is_forgotten(
    any_rig: Rig,
) -> None:
    producer, consumer = any_rig.pair()
    any_rig.transfer(producer, consumer)
    old_offer = producer.prefill(tokens=10, seed=1)
    (old_agent,) = consumer.fabric.peers
    prepared = consumer.fabric.prepared()
    any_rig.retire(producer)
    successor = any_rig.engine("P", port=producer.port)
    any_rig.transfer(successor, consumer, seed=2)
    wait_until(
        lambda: old_agent not in consumer.fabric.peers,
        "the former life is disconnected",
    )
    assert any_rig.until_over(consumer, consumer.load(old_offer.params)) in (
        FailureReason.REFUSED,
        FailureReason.TRANSFER,
    )
    any_rig.transfer(successor, consumer, seed=3)
    assert len(consumer.fabric.peers) == 1
    assert consumer.fabric.prepared() == prepared


@promise(1)
def test_params_of_a_former_life_are_refused_when_only_the_new_one_is_known(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    old_offer = producer.prefill(tokens=10)
    rig.retire(producer)
    successor = rig.engine("P", port=producer.port)
    assert (
        rig.until_over(consumer, consumer.load(old_offer.params))
        is FailureReason.REFUSED
    )
    rig.transfer(successor, consumer)


@promise(7)
def test_an_unworkable_pair_is_refused_with_every_reason_by_name(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer = rig.engine("P")
    facts = msgspec.structs.replace(FACTS, fingerprint="weights:2", dtype="float16")
    consumer = rig.engine("C", facts=facts, shape=CacheShape(block_tokens=8))
    with caplog.at_level(logging.WARNING):
        load = consumer.load(producer.prefill(tokens=10).params)
        assert rig.until_over(consumer, load) is FailureReason.PLAN
    for named in (
        "model.fingerprint",
        "weights:1",
        "weights:2",
        "model.dtype",
        "uint8",
        "float16",
    ):
        assert named in caplog.text
    same_model = rig.engine("D", shape=CacheShape(cell_bytes=32))
    load = same_model.load(producer.prefill(tokens=10).params)
    assert rig.until_over(same_model, load) is FailureReason.PLAN
    assert "layers.2/kv.cell_bytes: producer 16, consumer 32" in caplog.text
    assert consumer.fabric.calls["add_peer"] == 0


def test_a_peer_that_dies_during_a_read_fails_the_load_at_once(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    rig.network.polls_to_complete = 3
    offer = producer.prefill(tokens=10)
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    load = consumer.load(offer.params)
    rig.step_until(
        lambda: consumer.fabric.calls["post_data_read"] == 2, "the read is under way"
    )
    assert not consumer.seen.failed
    rig.network.kill(producer.fabric.agent_name)
    assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    assert not consumer.seen.alive
    # The load is reported before the peer is forgotten.
    wait_until(lambda: not consumer.fabric.peers, "the peer is forgotten")
    assert consumer.fabric.transfers() == 0


def test_a_lost_peer_is_left_alone_for_the_backoff_and_connected_again_after_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    short_backoff(monkeypatch, 0.4)
    consumer.fabric.fail(
        "post_data_read", lambda: PeerLost("test", "the test wanted it")
    )
    assert (
        rig.until_over(consumer, consumer.load(producer.prefill(tokens=5).params))
        is FailureReason.TRANSFER
    )
    lost_s = time.monotonic()
    load = consumer.load(producer.prefill(tokens=5).params)
    assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    assert producer.counters.total("handshakes_served") == 1, (
        "it was asked again before the back-off was over"
    )
    rig.step_until(
        lambda: time.monotonic() > lost_s + 0.6,
        "the longest that 0.4 s can become by jitter",
    )
    rig.transfer(producer, consumer)
    assert producer.counters.total("handshakes_served") == 2
