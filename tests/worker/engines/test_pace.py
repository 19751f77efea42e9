"""The pace of a worker: when a load is reported, how often the transfer thread polls, how long runs of reads are."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from kvferry.worker import transfer_thread
from kvferry.worker.fabric.port import PeerAgent
from kvferry.worker.loads.results import LoadRecord
from tests.harness.engine import Engine
from tests.harness.rig import Rig
from tests.waiting import wait_until

WINDOW_S = 0.4


@pytest.fixture
def nixl_rig() -> Iterator[Rig]:
    rig = Rig("nixl")
    yield rig
    rig.close()


class InOrder:
    """Gives out the lowest free blocks, one after the other."""

    def shuffle(self, free: list[int]) -> None:
        free.sort(reverse=True)


def _in_order(*engines: Engine) -> None:
    for engine in engines:
        engine._draw = InOrder()  # type: ignore[assignment]


def _load(rig: Rig, producer: Engine, consumer: Engine) -> LoadRecord:
    """Load 20 blocks in each of 3 layers and free them on both sides. Returns the record of the load."""
    rig.transfer(producer, consumer, tokens=80)
    return consumer.seen.totals[-1]


def test_blocks_that_follow_one_another_on_both_sides_are_read_in_long_runs(nixl_rig: Rig) -> None:
    producer, consumer = nixl_rig.pair()
    nixl_rig.transfer(producer, consumer)
    scattered = _load(nixl_rig, producer, consumer)
    _in_order(producer, consumer)
    merged = _load(nixl_rig, producer, consumer)
    assert scattered.planned_descriptors == merged.planned_descriptors == 60
    assert scattered.descriptors > 30
    assert merged.descriptors == 3
    assert merged.transferred_bytes == merged.planned_bytes


def test_a_load_is_reported_before_its_producer_is_notified(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    notify, thread = consumer.fabric.notify, consumer.worker._thread
    reported_before = []

    def noted(peer: PeerAgent, message: bytes) -> None:
        reported_before.append(bool(thread.results._results.loaded))
        notify(peer, message)

    consumer.fabric.notify = noted  # type: ignore[method-assign]
    consumer.load(producer.prefill(tokens=10).params)
    wait_until(lambda: reported_before, "the producer is notified")
    assert reported_before == [True]


def test_while_nothing_comes_a_producer_looks_for_notifications_less_and_less_often(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    offer = producer.prefill(tokens=10)
    thread = producer.worker._thread
    wait_until(lambda: thread._wait_s() == transfer_thread._MAX_NOTIFICATION_BACKOFF_S, "it has backed off")
    before = producer.fabric.calls["take_notifications"]
    time.sleep(WINDOW_S)
    assert producer.fabric.calls["take_notifications"] - before <= WINDOW_S / 20e-3 + 1
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is None
    rig.step_until(lambda: offer.request_id in producer.seen.sent, "what comes is taken")


def test_a_worker_that_becomes_idle_again_and_again_checks_its_integrity_once_a_second(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    thread = consumer.worker._thread
    checked: list[float] = []
    check = thread._integrity.check

    def noted() -> None:
        checked.append(time.monotonic())
        check()

    monkeypatch.setattr(thread._integrity, "check", noted)
    for seed in range(10):
        rig.transfer(producer, consumer, seed=seed)
    wait_until(lambda: checked and thread._integrity._is_checked, "the last thing that was done is checked, too")
    intervals_s = [after - before for before, after in itertools.pairwise(checked)]
    assert all(interval_s >= 1.0 for interval_s in intervals_s), intervals_s


@pytest.mark.parametrize(("round_s", "longest_s"), [(0.01, 0.03), (0.0001, 0.001)])
def test_the_longer_it_takes_to_look_at_all_loads_the_less_often_that_is_done(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, round_s: float, longest_s: float
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    thread = consumer.worker._thread
    rig.network.freeze(producer.fabric.agent_name)
    load = consumer.load(producer.prefill(tokens=10).params)
    wait_until(thread.runner.busy, "it reads")
    with monkeypatch.context() as patched:
        patched.setattr(thread.runner, "step", lambda: False)
        thread.runner.round_s = round_s
        wait_until(lambda: thread._wait_s() == pytest.approx(longest_s), "it has backed off")
    rig.network.thaw(producer.fabric.agent_name)
    assert rig.until_over(consumer, load) is None
