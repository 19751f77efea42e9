"""First contacts: prewarmed for a request that waits, prepared at the start, and timed."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.params import RemotePrefill
from kvferry.worker.peers.first_contact import PlanCache
from kvferry.worker.peers.peer import PeerKey, connect
from kvferry.worker.settings import WorkerSettings
from tests.harness.engine import Engine
from tests.harness.rig import Rig


def wait_in_the_queue(consumer: Engine, params: RemotePrefill, name: str = "waits") -> None:
    """Let a request arrive that is not scheduled yet."""
    assert consumer.loads.offer(name, params, params.remote_num_tokens, 0.0) is None


def knows(consumer: Engine, params: RemotePrefill) -> bool:
    registry = consumer.worker._thread.registry
    return PeerKey.of(params) in registry._ready


def test_a_producer_is_connected_while_its_first_request_waits_and_the_load_needs_no_handshake(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(10)
    wait_in_the_queue(consumer, offer.params)
    rig.step_until(lambda: knows(consumer, offer.params), "the producer is connected")
    assert not consumer.seen.loaded
    assert not consumer.seen.failed
    producer.listener.close()  # no handshake is answered any more
    consumer.loads.finished("waits")
    load = consumer.load(producer.prefill(10, 2).params)
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, 2)


def test_a_first_contact_that_fails_is_no_failed_load(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(10)
    producer.listener.close()
    consumer.worker._first_contact._settings = WorkerSettings(handshake_timeout_s=0.2)
    wait_in_the_queue(consumer, offer.params)

    def given_up() -> bool:
        return len(consumer.worker._thread.registry._backoff) > 0

    rig.step_until(given_up, "the producer cannot be connected")
    assert not consumer.seen.failed
    consumer.loads.finished("waits")
    load = consumer.load(producer.prefill(10, 2).params)
    assert rig.until_over(consumer, load) is FailureReason.HANDSHAKE


def test_the_time_of_a_first_contact_includes_all_of_its_parts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last part may end within the step in which the part before took long."""

    def slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return connect(*args)

    monkeypatch.setattr("kvferry.worker.peers.peer.connect", slowly)
    producer, consumer = rig.pair()
    with caplog.at_level(logging.INFO, logger="kvferry"):
        rig.transfer(producer, consumer)
    (said,) = [text for record in caplog.records if "connected in" in (text := record.getMessage())]
    all_ms, planned_ms, prepared_ms = map(float, re.findall(r"(?:in|planned|prepared) ([\d.]+)", said))
    assert prepared_ms >= 50.0
    assert all_ms >= planned_ms + prepared_ms - 0.2, "each is rounded"


def test_an_engine_starts_and_loads_although_its_own_plan_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    producer, consumer = rig.engine("P"), rig.engine("C")
    monkeypatch.setattr("kvferry.worker.fabric.errors.internal_errors._quiet_until_s", 0.0)
    with monkeypatch.context() as failing:
        failing.setattr(PlanCache, "plan", fail)
        consumer.worker.add_siblings(consumer.description.workers)
    assert "a first contact could not be prepared" in caplog.text
    rig.transfer(producer, consumer, tokens=23, seed=3)
