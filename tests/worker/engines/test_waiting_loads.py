"""Loads whose producer still computes: they are parked, cost little, hold no place, and end whatever happens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import EMPTY, SlotState, epoch_from_text, slot_word
from kvferry.worker.fabric.errors import TransferFailed
from kvferry.worker.loads import state as load_state
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, Offer, OrderedLoad
from tests.harness.exported import slots_of
from tests.harness.integrity import check_worker, snapshot_of
from tests.harness.rig import Rig
from tests.waiting import wait_until

TIMEOUT_S = 0.3
MANY = replace(SETTINGS, lease_slots=512, max_loads=8)


def park(
    producer: Engine, consumer: Engine, count: int = 1, seed: int = 5
) -> tuple[list[Offer], list[OrderedLoad]]:
    """Loads of prompts that the producer still computes; it is not stepped until they are parked."""
    running = [producer.start_prefill(tokens=5, seed=seed + n) for n in range(count)]
    offers = [producer.finish_prefill(request_id) for request_id in running]
    loads = [consumer.load(offer.params) for offer in offers]
    wait_until(lambda: consumer.parked_loads() >= count, "they are parked", 60.0)
    return offers, loads


def test_a_load_that_waits_for_its_producer_holds_no_place(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair(settings=replace(SETTINGS, max_loads=1))
    other = any_rig.engine("Q")
    any_rig.transfer(producer, consumer)
    _, (parked,) = park(producer, consumer)
    ready = consumer.load(other.prefill(tokens=9, seed=3).params)
    any_rig.step_until(
        lambda: consumer.seen.is_over(ready.request_id),
        "the other one is loaded",
        only=consumer,
    )
    assert consumer.has_bytes(ready, seed=3)
    assert not consumer.seen.is_over(parked.request_id)
    assert any_rig.until_over(consumer, parked) is None
    assert consumer.has_bytes(parked, seed=5)


def test_many_loads_that_wait_for_one_producer_cost_one_read_a_look(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = CacheShape(blocks=700, layers=1)
    producer, consumer = rig.pair(shape=shape, settings=MANY)
    rig.transfer(producer, consumer)
    _, loads = park(producer, consumer, count=300)
    assert consumer.entries_of_loads() == 0
    post, sizes = consumer.fabric.post_read, Counter[int]()

    def noted(local: Any, local_indices: Any, remote: Any, remote_indices: Any) -> Any:
        sizes[len(local_indices)] += 1
        return post(local, local_indices, remote, remote_indices)

    began_s = time.monotonic()
    monkeypatch.setattr(consumer.fabric, "post_read", noted)
    wait_until(lambda: sizes.total() >= 20, "it looks")
    assert sizes.keys() == {300}, "one read for all"
    assert sizes.total() <= (time.monotonic() - began_s) / 1e-3 + 1
    check_worker(consumer.worker)
    rig.step_until(lambda: len(consumer.seen.loaded) == 301, "all are loaded")
    assert all(consumer.has_bytes(load, seed=5 + n) for n, load in enumerate(loads))


FAULTS: dict[str, Callable[[Rig, Engine, Engine], None]] = {
    "a post": lambda _, __, consumer: consumer.fabric.fail(
        "post_read", lambda: TransferFailed("post", "the test")
    ),
    "a read": lambda rig, producer, _: rig.network.fail_reads(
        producer.fabric.agent_name
    ),
    "the producer": lambda rig, producer, _: rig.network.kill(
        producer.fabric.agent_name
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_failed_read_of_the_slots_fails_all_loads_that_wait_for_that_producer_and_no_other(
    rig: Rig, fault: Callable[[Rig, Engine, Engine], None]
) -> None:
    producer, consumer = rig.pair(settings=replace(MANY, failed_read_grace_s=0.02))
    other = rig.engine("Q", settings=MANY)
    rig.transfer(other, consumer)
    _, loads = park(producer, consumer, count=6)
    _, (unharmed,) = (
        park(other, consumer, seed=50)
        if fault is not FAULTS["a post"]
        else ([], [loads[0]])
    )
    fault(rig, producer, consumer)
    rig.step_until(
        lambda: len(consumer.seen.failed) == len(loads),
        "all have failed",
        only=consumer,
    )
    assert consumer.seen.failed == {
        load.request_id: FailureReason.TRANSFER for load in loads
    }
    assert not consumer.seen.alive, "nothing wrote into their blocks"
    if unharmed not in loads:
        assert rig.until_over(consumer, unharmed) is None
        assert consumer.has_bytes(unharmed, seed=50)


def test_the_deadline_of_a_load_that_waits_counts_from_the_last_change_of_its_slot(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    (offer,), (load,) = park(producer, consumer)
    consumer.set_timeouts(load_s=TIMEOUT_S)
    progress, began_s = slots_of(producer.worker).progress, time.monotonic()
    changed_s = began_s
    while changed_s < began_s + 3 * TIMEOUT_S:
        progress[offer.slot] += 1
        changed_s = time.monotonic()
        consumer.step()
        assert not consumer.seen.failed
        time.sleep(TIMEOUT_S / 20)
    rig.step_until(lambda: consumer.seen.failed, "the deadline", only=consumer)
    assert time.monotonic() - changed_s > TIMEOUT_S - 0.02
    assert consumer.seen.failed == {load.request_id: FailureReason.DEADLINE}
    assert not consumer.seen.alive


def test_a_producer_that_changes_a_slot_for_ever_does_not_hold_a_load_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_state, "LONGEST", 3)
    # So long that a thread which has to wait for a processor has seen the slot change all the same.
    timeout_s = 1.0
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    (offer,), (load,) = park(producer, consumer)
    consumer.set_timeouts(load_s=timeout_s)
    progress, began_s = slots_of(producer.worker).progress, time.monotonic()

    def has_failed() -> bool:
        progress[offer.slot] += 1
        return bool(consumer.seen.failed)

    rig.step_until(has_failed, "the deadline", only=consumer)
    assert time.monotonic() - began_s > 2 * timeout_s, "it did progress"
    assert consumer.seen.failed == {load.request_id: FailureReason.DEADLINE}
    # And not because a change was missed: then this deadline would not be needed.
    assert "not over 3 s after its order" in caplog.text
    assert not consumer.seen.alive


def test_loads_that_wait_for_a_frozen_producer_miss_their_deadlines_and_the_read_is_kept_until_it_ends(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    _, loads = park(producer, consumer, count=3)
    rig.network.freeze(producer.fabric.agent_name)
    consumer.set_timeouts(load_s=TIMEOUT_S)
    rig.step_until(
        lambda: len(consumer.seen.failed) == 3, "the deadline", only=consumer
    )
    assert set(consumer.seen.failed.values()) == {FailureReason.DEADLINE}
    assert not consumer.seen.alive
    wait_until(lambda: snapshot_of(consumer.worker).entries.taken, "the read is kept")
    check_worker(consumer.worker)
    assert not consumer.all_entries_are_free()
    rig.network.thaw(producer.fabric.agent_name)
    wait_until(consumer.all_entries_are_free, "it has ended")
    consumer.set_timeouts()
    for load in loads:
        consumer.free(load)
    rig.transfer(producer, consumer)


def test_the_peer_of_a_load_that_waits_is_not_forgotten(rig: Rig) -> None:
    settings = replace(SETTINGS, peer_ttl_s=0.05, max_peers=1)
    producer, consumer = rig.pair(settings=settings)
    other = rig.engine("Q", settings=settings)
    _, (load,) = park(producer, consumer)
    began_s = time.monotonic()
    wait_until(lambda: time.monotonic() > began_s + 0.2, "its time to live is over")
    rig.until_over(consumer, consumer.load(other.prefill(tokens=5).params))
    assert rig.until_over(consumer, load) is None
    assert consumer.fabric.calls["add_peer"] == 2, "each was connected once"


def test_a_lease_that_ends_while_a_load_waits_for_it_fails_the_load(
    any_rig: Rig,
) -> None:
    producer, consumer = any_rig.pair()
    (offer,), (load,) = park(producer, consumer)
    words = slots_of(producer.worker).words
    word, words[offer.slot] = int(words[offer.slot]), EMPTY
    any_rig.step_until(lambda: consumer.seen.failed, "it has failed", only=consumer)
    words[offer.slot] = word
    assert consumer.seen.failed == {load.request_id: FailureReason.FENCE}
    assert consumer.fabric.calls["post_data_read"] == 0


def late(
    producer: Engine, consumer: Engine, opens_within_s: float
) -> tuple[Offer, OrderedLoad, int]:
    """A load whose slot is not open, and the word that the slot would have."""
    offer = producer.prefill(tokens=5, seed=8)
    word = slot_word(epoch_from_text(offer.params.kvferry.lease_epoch), SlotState.READY)
    wait_until(lambda: producer.word(offer) == word, "it is ready")
    slots_of(producer.worker).words[offer.slot] = EMPTY
    params = producer.changed(offer, ticket={"opens_within_s": opens_within_s})
    return offer, consumer.load(params), word


def test_a_slot_that_opens_in_time_is_waited_for(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer, load, word = late(producer, consumer, opens_within_s=60.0)
    wait_until(lambda: consumer.parked_loads(), "it is parked")
    slots_of(producer.worker).words[offer.slot] = word
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=8)


def test_a_slot_that_does_not_open_in_time_fails_the_load(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer, load, word = late(producer, consumer, opens_within_s=TIMEOUT_S)
    began_s = time.monotonic()
    assert rig.until_over(consumer, load) is FailureReason.FENCE
    assert time.monotonic() - began_s > TIMEOUT_S - 0.05
    slots_of(producer.worker).words[offer.slot] = word


def test_closing_with_loads_that_wait_leaves_no_read_in_flight(rig: Rig) -> None:
    producer, consumer = rig.pair()
    park(producer, consumer, count=3)
    consumer.worker.close()
    assert not rig.network.released
    assert not consumer.fabric.transfers()
