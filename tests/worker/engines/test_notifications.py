"""Notifications that are lost, doubled, late, forged or malformed: counted, and nothing is freed by them wrongly."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvferry.protocol.ids import EMPTY, Epoch, epoch_to_text
from kvferry.protocol.notifications import MAGIC, Done, encode_notification
from tests.fakes.memory_fabric import MemoryFabric
from tests.harness.engine import Engine, Offer
from tests.harness.rig import Rig
from tests.waiting import wait_until

MALFORMED = {
    "empty": b"",
    "another protocol's": b"req-7:1",
    "the magic alone": MAGIC,
    "no msgpack": MAGIC + b"\xc1",
    "cut short": encode_notification(Done(slot=0, epoch="1" * 15, consumer="a" * 32, worker=0, expected=1))[:-3],
    "too long": MAGIC + b"\x00" * 10_000,
    "deeply nested": MAGIC + b"\x91" * 4000,
    "bad text": MAGIC + b"\xa4\xff\xfe\xfd\xfc",
}


def _send(rig: Rig, producer: Engine, *frames: bytes) -> None:
    """Send a notification from an agent that the producer does not know."""
    fabric = MemoryFabric(f"other-{len(rig.network._by_name)}", rig.network)
    peer = fabric.add_peer(producer.fabric.metadata())
    for frame in frames:
        fabric.notify(peer, frame)


def _done(offer: Offer, *, worker: int = 0, expected: int = 1, **changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "slot": offer.slot,
        "epoch": offer.params.kvferry.lease_epoch,
        "consumer": "a" * 32,
        **changed,
    }
    return encode_notification(Done(worker=worker, expected=expected, **fields))


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_counted_and_frees_nothing(rig: Rig, frame: bytes) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10)
    _send(rig, producer, frame, frame)
    rig.step_until(lambda: producer.seen.counts["bad_notifications"] == 2, "they are counted")
    assert not producer.seen.sent
    assert producer.word(offer) != EMPTY
    rig.transfer(producer, consumer)


def test_a_flood_of_malformed_ones_is_counted_whole_and_does_not_flood_the_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = rig.pair()
    producer.prefill(tokens=10)
    _send(rig, producer, *[MAGIC + b"\xc1"] * 2000)
    rig.step_until(lambda: producer.seen.counts["bad_notifications"] == 2000, "they are counted", timeout_s=60.0)
    assert 1 <= caplog.text.count("ignored a notification") < 100
    rig.transfer(producer, consumer)


@pytest.mark.parametrize("changed", [{"epoch": "0" * 14 + "1"}, {"slot": 15}, {"slot": 2**24 - 1}])
def test_what_is_about_no_lease_is_counted_and_frees_nothing(rig: Rig, changed: dict[str, Any]) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10)
    _send(rig, producer, _done(offer, **changed))
    rig.step_until(lambda: producer.seen.counts["late_notifications"] == 1, "it is counted")
    assert not producer.seen.sent
    assert producer.word(offer) != EMPTY
    rig.transfer(producer, consumer)


def test_a_good_one_among_bad_ones_counts(rig: Rig) -> None:
    producer, _ = rig.pair()
    offer = producer.prefill(tokens=10)
    _send(rig, producer, MAGIC, _done(offer), b"\xff")
    rig.step_until(lambda: producer.seen.sent == [offer.request_id], "the good one counts")
    rig.step_until(lambda: producer.seen.counts["bad_notifications"] == 2, "the bad ones are counted")


def test_one_worker_that_repeats_itself_does_not_free_what_its_sibling_still_reads(rig: Rig) -> None:
    producer, _ = rig.pair()
    offer = producer.prefill(tokens=10)
    bystander = producer.prefill(tokens=3)
    _send(rig, producer, *[_done(offer, worker=0, expected=2)] * 5, _done(bystander))
    rig.step_until(lambda: producer.seen.sent == [bystander.request_id], "all six have been taken")
    assert producer.word(offer) != EMPTY
    _send(rig, producer, _done(offer, worker=1, expected=2))
    rig.step_until(
        lambda: producer.seen.sent == [bystander.request_id, offer.request_id], "the sibling has sent its own"
    )
    assert producer.word(offer) == EMPTY


def test_a_doubled_notification_counts_once(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.network.stutter[producer.fabric.agent_name] = 1
    rig.transfer(producer, consumer)
    rig.transfer(producer, consumer)
    rig.step_until(lambda: producer.seen.counts["late_notifications"] == 1, "the second copy is counted")
    assert len(producer.seen.sent) == len(set(producer.seen.sent)) == 2


def test_a_lost_notification_costs_the_rest_of_the_lease_and_no_more(rig: Rig) -> None:
    producer, consumer = rig.pair(lease_s=0.3)
    rig.network.deaf[producer.fabric.agent_name] = 1
    offer = producer.prefill(tokens=10)
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is None
    rig.step_until(lambda: offer.request_id in producer.seen.sent, "the lease runs out")
    assert producer.counters.total("leases_released", "expired") == 1
    rig.transfer(producer, consumer)


def test_a_notification_that_is_here_when_its_lease_is_ended_counts(rig: Rig) -> None:
    """Otherwise a lease that was read well and ended at the same moment would look as if its reader came too late."""
    producer, consumer = rig.pair()
    rig.transfer(consumer, producer)
    over = threading.Event()
    producer.fabric.on_data_read = lambda: wait_until(over.is_set, "both are here")
    offer, bystander = producer.prefill(tokens=10), producer.prefill(tokens=3)
    stuck = producer.load(consumer.prefill(tokens=10, seed=2).params)
    wait_until(lambda: producer.fabric.calls["post_data_read"] == 2, "its thread is busy")
    _send(rig, producer, _done(offer))
    producer.end(offer)
    over.set()
    assert rig.until_over(producer, stuck) is None
    _send(rig, producer, _done(bystander))
    rig.step_until(lambda: producer.seen.sent == [offer.request_id, bystander.request_id], "both are over")
    assert producer.seen.counts["late_notifications"] == 0


def test_a_guessed_epoch_among_a_thousand_frees_nothing(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10)
    _send(rig, producer, *[_done(offer, epoch=epoch_to_text(Epoch(guess))) for guess in range(1, 1001)])
    rig.step_until(lambda: producer.seen.counts["late_notifications"] == 1000, "all are counted")
    assert rig.until_over(consumer, consumer.load(offer.params)) is None
