"""Loads that take too long: reported failed at once, their blocks named until nothing can write them any more."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.load import TailZeroing
from kvferry.worker.loads.results import StepResults
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import POISON, Engine, OrderedLoad
from tests.harness.integrity import check_worker
from tests.harness.rig import Rig
from tests.waiting import wait_until

TIMEOUT_S = 0.3
HURRIED = replace(SETTINGS, load_timeout_s=TIMEOUT_S)


def _stuck(rig: Rig) -> tuple[Engine, Engine, OrderedLoad]:
    """A load whose data read has been posted and does not end. Its deadline is far away."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    return producer, consumer, _stick(rig, producer, consumer)


def _stick(rig: Rig, producer: Engine, consumer: Engine) -> OrderedLoad:
    reads = consumer.fabric.calls["post_data_read"]
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    load = consumer.load(producer.prefill(tokens=10, seed=6).params)
    wait_until(lambda: consumer.fabric.calls["post_data_read"] > reads, "it reads")
    return load


def test_a_stuck_load_is_reported_at_once_and_its_blocks_are_named_until_its_read_has_ended(
    rig: Rig,
) -> None:
    producer, consumer, load = _stuck(rig)
    consumer.set_timeouts(load_s=0.0)
    results: list[StepResults] = []

    def failed() -> bool:
        results.extend(consumer.collect())
        return bool(results[-1].failed)

    wait_until(failed, "it is reported")
    assert results[-1].failed == {load.request_id: FailureReason.DEADLINE}
    assert results[-1].still_written == frozenset((load.request_id,)), (
        "both in one report, or the blocks could be given away in between"
    )
    assert (consumer.caches.cells(0)[list(load.blocks)] == POISON).all()
    polls = consumer.fabric.calls["poll"]
    wait_until(
        lambda: consumer.fabric.calls["poll"] > polls + 3, "its read is looked after"
    )
    assert consumer.collect()[0].still_written is None, "nothing has changed"
    assert consumer.fabric.transfers() == 1
    rig.network.thaw(producer.fabric.agent_name)
    rig.step_until(lambda: not consumer.seen.alive, "the read has ended")
    consumer.set_timeouts()
    assert (consumer.caches.cells(0)[list(load.blocks)] != POISON).any(), (
        "it did write, as late as this"
    )
    assert consumer.fabric.transfers() == 0
    assert consumer.all_entries_are_free()
    assert load.request_id not in consumer.seen.loaded
    rig.transfer(producer, consumer)


def test_a_load_of_a_producer_that_never_finishes_misses_its_deadline_and_leaves_nothing_alive(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair(settings=HURRIED)
    offer = producer.finish_prefill(producer.start_prefill(tokens=10, seed=1))
    began_s = time.monotonic()
    load = consumer.load(offer.params)
    rig.step_until(lambda: consumer.seen.failed, "the deadline", only=consumer)
    assert TIMEOUT_S - 0.01 < time.monotonic() - began_s < SETTINGS.load_timeout_s
    assert consumer.seen.failed == {load.request_id: FailureReason.DEADLINE}
    rig.step_until(
        lambda: not consumer.seen.alive, "its slot read has ended", only=consumer
    )
    assert consumer.all_entries_are_free()


def test_a_load_that_never_gets_its_turn_misses_its_deadline(rig: Rig) -> None:
    producer, consumer = rig.pair(settings=replace(SETTINGS, max_loads=1))
    rig.transfer(producer, consumer)
    loads = [_stick(rig, producer, consumer)]
    loads += [consumer.load(producer.prefill(tokens=5).params) for _ in range(2)]
    reads, polls = consumer.fabric.calls["post_read"], consumer.fabric.calls["poll"]
    wait_until(
        lambda: consumer.fabric.calls["poll"] > polls + 20, "the orders have been taken"
    )
    assert consumer.fabric.calls["post_read"] == reads
    consumer.set_timeouts(load_s=0.0)
    for load in loads:
        assert rig.until_over(consumer, load) is FailureReason.DEADLINE
    assert consumer.seen.alive == {loads[0].request_id}
    assert consumer.fabric.calls["post_data_read"] == 2
    consumer.set_timeouts()
    rig.network.thaw(producer.fabric.agent_name)
    rig.step_until(lambda: not consumer.seen.alive, "the read has ended")
    rig.transfer(producer, consumer)


def test_a_load_that_waits_for_the_staging_pool_misses_its_deadline_and_its_place_in_the_queue(
    rig: Rig,
) -> None:
    staged = replace(SETTINGS, staging_pool_bytes=8 << 10, direct_min_bytes=1 << 20)
    producer = rig.engine("P", shape=CacheShape(axes="bht"), settings=staged)
    consumer = rig.engine("C", shape=CacheShape(axes="bth"), settings=staged)
    rig.transfer(producer, consumer)
    pool = consumer.pool
    waves = [
        pool.try_take(f"other-{n}", f"peer-{n}", pool.largest_wave) for n in range(7)
    ]
    assert all(wave is not None for wave in waves)
    consumer.set_timeouts(load_s=TIMEOUT_S)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load, timeout_s=60.0) is FailureReason.DEADLINE
    assert not consumer.seen.alive
    assert not pool.waiting
    for wave in waves:
        assert wave is not None
        pool.give_back(wave)
    consumer.set_timeouts()
    rig.transfer(producer, consumer)


def test_a_load_whose_slot_is_not_answered_after_the_data_misses_its_deadline_and_its_blocks_are_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the read of the slot is still in flight, but the blocks were read into: they wait for it."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    zero = TailZeroing.zero

    def freeze_and_zero(tail_zeroing: TailZeroing, *what: Any) -> Any:
        rig.network.freeze(producer.fabric.agent_name)
        return zero(tail_zeroing, *what)

    monkeypatch.setattr(TailZeroing, "zero", freeze_and_zero)
    consumer.set_timeouts(load_s=TIMEOUT_S)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load, timeout_s=60.0) is FailureReason.DEADLINE
    assert consumer.seen.alive == {load.request_id}
    assert consumer.fabric.transfers() == 1
    rig.network.thaw(producer.fabric.agent_name)
    rig.step_until(lambda: not consumer.seen.alive, "the read has ended")


def test_a_post_that_does_not_return_fails_the_load_in_time_and_its_blocks_are_named_until_it_does(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer thread can do nothing then; the step thread does."""
    monkeypatch.setattr("kvferry.worker.loads.results.SLACK_S", 0.1)
    ahead_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr("kvferry.worker.loads.results.time", clock)
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    go_on = threading.Event()
    consumer.fabric.on_data_read = lambda: _wait(go_on)
    offer = producer.prefill(tokens=10, seed=3)
    posts = consumer.fabric.calls["post_data_read"]
    load = consumer.load(offer.params)
    wait_until(lambda: consumer.fabric.calls["post_data_read"] > posts, "it is stuck")
    ahead_s = SETTINGS.load_timeout_s
    consumer.step()
    assert not consumer.seen.failed, (
        "it has to be late for longer than a pause of the process"
    )
    ahead_s += 1.0
    rig.step_until(
        lambda: consumer.seen.failed, "the deadline", only=consumer, timeout_s=60.0
    )
    assert consumer.seen.failed == {load.request_id: FailureReason.DEADLINE}
    assert consumer.seen.alive == {load.request_id}
    go_on.set()
    rig.step_until(
        lambda: not consumer.seen.alive, "the post has returned, and the read has ended"
    )
    assert load.request_id not in consumer.seen.loaded, "it is not reported again"
    assert list(consumer.seen.failed) == [load.request_id]
    check_worker(consumer.worker, idle=True)


def _wait(event: threading.Event) -> None:
    assert event.wait(60)
