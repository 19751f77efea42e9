"""Idle workers: nothing is left after the work, and a worker without work does nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from kvferry.protocol.slots import (
    EMPTY,
)
from kvferry.worker.loads.runner import UNAWAITED_POLL_S
from kvferry.worker.transfer_thread import IDLE_NOTIFICATION_S
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import Engine
from tests.harness.integrity import ANSWER_WITHIN_S, snapshot_of
from tests.harness.rig import Rig
from tests.waiting import LONGEST_JOIN_S, wait_until

pytestmark = pytest.mark.slow

WINDOW_S = 0.4
THREAD = "kvferry-transfer"


def _calls(engine: Engine) -> int:
    """Without the taking of notifications, which anyone can send to an idle worker too."""
    return sum(engine.fabric.calls.values()) - engine.fabric.calls["take_notifications"]


def _cpu_s(thread: threading.Thread) -> float:
    """Processor time that a thread has used. Not the process's: the fabric has threads, and the test waits, too."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _is_idle(engine: Engine) -> bool:
    return snapshot_of(engine.worker).is_idle


def test_without_work_the_threads_block(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    any_rig.transfer(producer, consumer)
    for engine in (producer, consumer):
        wait_until(lambda engine=engine: _is_idle(engine), "it waits for ever")  # type: ignore[misc]
    before = [_calls(engine) for engine in (producer, consumer)]
    taken = producer.fabric.calls["take_notifications"]
    threads = [each for each in threading.enumerate() if each.name == THREAD]
    assert len(threads) == 2
    cpu_s = sum(map(_cpu_s, threads))
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() > began_s + WINDOW_S, "the window is over")
    used_s = sum(map(_cpu_s, threads)) - cpu_s
    # The window may be much longer than it should be where others have the processor.
    lasted_s = time.monotonic() - began_s
    assert [_calls(engine) for engine in (producer, consumer)] == before
    most_taken = 1 + lasted_s / IDLE_NOTIFICATION_S
    assert producer.fabric.calls["take_notifications"] - taken <= most_taken
    assert used_s < 0.05 * lasted_s


def test_a_frozen_peer_that_was_given_up_is_polled_seldom(rig: Rig) -> None:
    producer, consumer = rig.pair(settings=replace(SETTINGS, handshake_timeout_s=0.1))
    rig.network.freeze(producer.fabric.agent_name)
    assert (
        rig.until_over(consumer, consumer.load(producer.prefill(tokens=5).params))
        is not None
    )
    began_s = time.monotonic()
    polls = consumer.fabric.calls["poll"]
    wait_until(lambda: consumer.fabric.calls["poll"] > polls + 20, "it is polled")
    polled = consumer.fabric.calls["poll"] - polls
    assert polled <= 1 + (time.monotonic() - began_s) / UNAWAITED_POLL_S


def test_closing_clears_the_lease_table_and_is_quick_even_with_a_read_under_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.worker.transfer_thread._JOIN_S", LONGEST_JOIN_S)
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=5)
    wait_until(lambda: producer.word(offer) != EMPTY, "it is held")
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    consumer.load(offer.params)
    wait_until(
        lambda: consumer.fabric.calls["post_data_read"] == 1, "the read is under way"
    )
    for engine in (producer, consumer):
        began_s = time.monotonic()
        engine.worker.close()
        assert time.monotonic() - began_s < LONGEST_JOIN_S / 2, "the thread ends itself"
        engine.worker.close()
        assert engine.fabric.calls["close"] >= 1
    assert producer.word(offer) == EMPTY


def test_closing_lets_a_read_that_is_about_to_end_do_so(rig: Rig) -> None:
    """The memory goes back to the engine afterwards."""
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=40, seed=5)
    rig.transfer(producer, consumer)
    rig.network.polls_to_complete = 60
    load = consumer.load(offer.params)
    wait_until(
        lambda: consumer.fabric.calls["post_data_read"] == 2, "the read is under way"
    )
    consumer.worker.close()
    assert not rig.network.released, "a read was released in flight"
    assert consumer.has_bytes(load, seed=5)


def test_a_thread_that_is_stuck_in_the_fabric_keeps_its_fabric(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may use an agent beside the thread that owns it."""
    monkeypatch.setattr("kvferry.worker.transfer_thread._JOIN_S", 0.05)
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = consumer.prefill(tokens=5)
    released = [False]
    consumer.fabric.on_data_read = lambda: wait_until(
        lambda: released[0], "the test lets go"
    )
    consumer.load(producer.prefill(tokens=5).params)
    wait_until(lambda: consumer.fabric.calls["post_data_read"] == 2, "it is stuck")
    consumer.worker.close()
    assert consumer.fabric.calls["close"] == 0
    assert consumer.word(offer) == EMPTY, "its leases are over all the same"
    released[0] = True
    wait_until(lambda: consumer.worker.snapshot(ANSWER_WITHIN_S) is None, "it ends")
    consumer.worker.close()
    assert consumer.fabric.calls["close"] == 1
