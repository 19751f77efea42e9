"""The fence: a load is good only if the lease of the blocks that it read was READY before and after."""

from __future__ import annotations

import threading

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import EMPTY, SlotState, epoch_from_text, slot_word
from kvferry.worker.loads.load import TailZeroing
from tests.fakes.device_mark import FakeMark
from tests.harness.engine import Engine, Offer
from tests.harness.exported import slots_of
from tests.harness.rig import Rig
from tests.waiting import wait_until


def test_a_lease_that_ended_before_the_read_is_not_read_from(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    any_rig.transfer(producer, consumer)
    reads = consumer.fabric.calls["post_data_read"]
    offer = producer.prefill(tokens=10)
    producer.give_away(offer)
    assert producer.word(offer) == EMPTY
    load = consumer.load(offer.params)
    assert any_rig.until_over(consumer, load) is FailureReason.FENCE
    assert consumer.fabric.calls["post_data_read"] == reads


def lease_ends_during_the_read(
    rig: Rig,
) -> tuple[Engine, Engine, Offer, FailureReason | None, bool]:
    """The slot is READY; then the lease ends and the blocks get new content; then the data is read."""
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10, seed=5)
    rig.network.polls_to_complete = 2
    consumer.fabric.on_data_read = lambda: producer.give_away(offer)
    load = consumer.load(offer.params)

    def reported() -> bool:
        consumer.collect()  # the consumer alone: the producer is stepped on its transfer thread, by `give_away`
        return load.request_id in (*consumer.seen.loaded, *consumer.seen.failed)

    wait_until(reported, "the load is over")
    reason = consumer.seen.failed.get(load.request_id)
    return producer, consumer, offer, reason, consumer.has_bytes(load, offer.seed)


def test_a_load_whose_blocks_were_given_away_during_the_read_is_never_good(
    any_rig: Rig,
) -> None:
    producer, consumer, offer, reason, has_bytes = lease_ends_during_the_read(any_rig)
    assert reason is FailureReason.FENCE
    assert not has_bytes, "the test did not corrupt anything"
    assert not consumer.seen.loaded
    any_rig.transfer(producer, consumer)
    assert producer.seen.sent.count(offer.request_id) == 1


def test_blocks_that_are_still_being_zeroed_when_the_fence_fails_are_named_until_that_is_over(
    any_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU zeroing is launched, not done: it could otherwise reach the blocks' next owner."""
    zeroed = FakeMark()
    monkeypatch.setattr(TailZeroing, "zero", lambda *_: zeroed)
    _, consumer, _, reason, _ = lease_ends_during_the_read(any_rig)
    (request_id,) = consumer.seen.failed
    assert reason is FailureReason.FENCE
    assert consumer.seen.alive == {request_id}
    zeroed.over = True
    any_rig.step_until(lambda: not consumer.seen.alive, "nothing is written any more")


def test_a_lease_that_computes_again_after_the_read_is_no_good_either(rig: Rig) -> None:
    """Only READY counts after the data, even under the same epoch."""
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10)
    epoch = epoch_from_text(offer.params.kvferry.lease_epoch)

    def computes_again() -> None:
        slots_of(producer.worker).words[offer.slot] = slot_word(
            epoch, SlotState.COMPUTING
        )

    consumer.fabric.on_data_read = computes_again
    assert rig.until_over(consumer, consumer.load(offer.params)) is FailureReason.FENCE


def test_a_lease_that_a_consumer_waits_for_is_renewed_beyond_its_time(rig: Rig) -> None:
    producer, consumer = rig.pair(lease_s=0.6)
    offer = producer.finish_prefill(producer.start_prefill(tokens=10, seed=1))
    stalled = threading.Event()
    consumer.fabric.on_data_read = lambda: _wait(stalled)
    load = consumer.load(offer.params)
    rig.step_until(
        lambda: (
            producer.counters.total("heartbeats")
            + consumer.counters.total("heartbeats")
            >= 8
        ),
        "renewals",
    )
    assert producer.word(offer) != EMPTY
    stalled.set()
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=1)


def test_leases_are_open_when_the_orders_are_handed_over_however_busy_the_worker_is(
    rig: Rig,
) -> None:
    """To a consumer that came before the lease, the lease would have ended."""
    producer, consumer = rig.pair()
    rig.transfer(consumer, producer)
    stuck, entered = threading.Event(), threading.Event()

    def read_for_long() -> None:
        entered.set()
        _wait(stuck)

    producer.fabric.on_data_read = read_for_long
    load = producer.load(consumer.prefill(tokens=10, seed=3).params)
    assert entered.wait(10)
    request_id = producer.start_prefill(tokens=5, seed=1)
    offer = producer.finish_prefill(request_id)
    epoch = epoch_from_text(offer.params.kvferry.lease_epoch)
    assert producer.word(offer) == slot_word(epoch, SlotState.COMPUTING)
    stuck.set()
    assert rig.until_over(producer, load) is None


def _wait(event: threading.Event) -> None:
    assert event.wait(10)
