"""Notifications that are doubled, late, forged or malformed, and the read that is posted behind each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.ids import Epoch
from kvferry.protocol.slots import (
    EMPTY,
    MAGIC,
    Done,
    encode_notification,
    epoch_to_text,
)
from kvferry.worker.fabric.errors import FabricError, PeerLost, TransferFailed
from tests.fakes.memory_fabric import MemoryFabric
from tests.harness.cache_engine import wait_until_idle
from tests.harness.engine import Engine, Offer
from tests.harness.inside import thread_of
from tests.harness.integrity import check_worker
from tests.harness.rig import Rig
from tests.waiting import wait_until


def _send(rig: Rig, producer: Engine, *frames: bytes) -> None:
    """Send a notification from an agent that the producer does not know."""
    fabric = MemoryFabric(f"other-{len(rig.network.agents)}", rig.network)
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


def test_a_flood_of_malformed_ones_is_counted_whole_and_does_not_flood_the_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = rig.pair()
    producer.prefill(tokens=10)
    _send(rig, producer, *[MAGIC + b"\xc1"] * 2000)
    rig.step_until(
        lambda: producer.seen.counts["bad_notifications"] == 2000,
        "they are counted",
        timeout_s=60.0,
    )
    assert 1 <= caplog.text.count("ignored a notification") < 100
    rig.transfer(producer, consumer)


def test_an_idle_worker_takes_notifications_that_it_does_not_expect(rig: Rig) -> None:
    """Also before its first orders. NIXL keeps them until then, any number from any agent."""
    producer, _ = rig.pair()
    producer.worker.start()
    for times in range(1, 4):
        _send(rig, producer, *[MAGIC + b"\xc1"] * 100)
        inbox = rig.network.agents[producer.fabric.agent_name].inbox
        wait_until(lambda: not inbox, "they are taken")  # noqa: B023 - called here
        rig.step_until(
            lambda times=times: (
                producer.seen.counts["bad_notifications"] == 100 * times
            ),  # type: ignore[misc]
            "they are counted",
        )


def test_one_worker_that_repeats_itself_does_not_free_what_its_sibling_still_reads(
    rig: Rig,
) -> None:
    producer, _ = rig.pair()
    offer = producer.prefill(tokens=10)
    bystander = producer.prefill(tokens=3)
    _send(rig, producer, *[_done(offer, worker=0, expected=2)] * 5, _done(bystander))
    rig.step_until(
        lambda: producer.seen.sent == [bystander.request_id], "all six have been taken"
    )
    assert producer.word(offer) != EMPTY
    _send(rig, producer, _done(offer, worker=1, expected=2))
    rig.step_until(
        lambda: producer.seen.sent == [bystander.request_id, offer.request_id],
        "the sibling has sent its own",
    )
    assert producer.word(offer) == EMPTY


def test_a_doubled_notification_counts_once(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.network.stutter[producer.fabric.agent_name] = 1
    rig.transfer(producer, consumer)
    rig.transfer(producer, consumer)
    rig.step_until(
        lambda: producer.seen.counts["late_notifications"] == 1,
        "the second copy is counted",
    )
    assert len(producer.seen.sent) == len(set(producer.seen.sent)) == 2


def test_a_notification_that_is_here_when_its_lease_is_ended_counts(rig: Rig) -> None:
    """Otherwise a lease that was read well and ended at the same moment would look as if its reader came too late."""
    producer, consumer = rig.pair()
    rig.transfer(consumer, producer)
    over = threading.Event()
    producer.fabric.on_data_read = lambda: wait_until(over.is_set, "both are here")
    offer, bystander = producer.prefill(tokens=10), producer.prefill(tokens=3)
    stuck = producer.load(consumer.prefill(tokens=10, seed=2).params)
    wait_until(
        lambda: producer.fabric.calls["post_data_read"] == 2, "its thread is busy"
    )
    _send(rig, producer, _done(offer))
    producer.end(offer)
    over.set()
    assert rig.until_over(producer, stuck) is None
    _send(rig, producer, _done(bystander))
    rig.step_until(
        lambda: producer.seen.sent == [offer.request_id, bystander.request_id],
        "both are over",
    )
    assert producer.seen.counts["late_notifications"] == 0


def test_a_guessed_epoch_among_a_thousand_frees_nothing(rig: Rig) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(tokens=10)
    _send(
        rig,
        producer,
        *[_done(offer, epoch=epoch_to_text(Epoch(guess))) for guess in range(1, 1001)],
    )
    rig.step_until(
        lambda: producer.seen.counts["late_notifications"] == 1000, "all are counted"
    )
    assert rig.until_over(consumer, consumer.load(offer.params)) is None


def _with_each_message(consumer: Engine, then: Callable[[], object]) -> list[int]:
    """Call a function after each message. Returns how many reads had been posted by then, for each message."""
    notify, reads = consumer.fabric.notify, list[int]()

    def notified(peer: str, message: bytes) -> None:
        notify(peer, message)  # type: ignore[arg-type]
        reads.append(consumer.fabric.calls["post_read"])
        then()

    consumer.fabric.notify = notified  # type: ignore[method-assign]
    return reads


def _wait_for_read_behind(consumer: Engine, reads: list[int]) -> None:
    wait_until(
        lambda: reads and consumer.fabric.calls["post_read"] == reads[-1] + 1,
        "a read follows the message",
    )


def test_a_load_is_over_while_the_read_behind_its_message_is_in_flight(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    wait_until_idle(consumer.worker)
    reads = _with_each_message(
        consumer, lambda: rig.network.freeze(producer.fabric.agent_name)
    )
    load = consumer.load(producer.prefill(tokens=10, seed=2).params)
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=2)
    _wait_for_read_behind(consumer, reads)
    with pytest.raises(LocalProtocolError, match="1 flushing"):
        check_worker(consumer.worker, idle=True)
    check_worker(consumer.worker)
    rig.network.thaw(producer.fabric.agent_name)
    wait_until_idle(consumer.worker)
    assert consumer.all_entries_are_free()


@pytest.mark.parametrize(
    "error", [PeerLost("test", "gone"), TransferFailed("test", "of the test")]
)
def test_a_read_behind_a_message_that_cannot_be_posted_costs_the_load_nothing(
    rig: Rig, error: FabricError
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    wait_until_idle(consumer.worker)
    _with_each_message(
        consumer, lambda: consumer.fabric.fail("post_read", lambda: error)
    )
    rig.transfer(producer, consumer)
    wait_until(lambda: consumer.fabric.failures_left("post_read") == 0, "it was tried")
    thread_of(consumer.worker).reader.grace_s = 0.0
    wait_until_idle(consumer.worker)
    assert consumer.seen.counts["failed_notifications"] == 0
