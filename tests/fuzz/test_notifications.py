"""Notifications that reach a worker: forged, repeated, in any order, with any numbers in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.ids import MAX_WORKERS
from kvferry.protocol.notifications import MAGIC, MAX_NOTIFICATION_BYTES, Done, decode_notification, encode_notification
from kvferry.worker.leases import MAX_CONSUMERS
from tests.fakes.memory_fabric import MemoryFabric
from tests.fuzz.test_targets import hostile_bytes
from tests.harness.engine import Engine, Offer
from tests.harness.rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("memory")
    yield rig
    rig.close()


def done(offer: Offer, worker: int = 0, expected: int = 1, consumer: str = "c" * 32, epoch: str = "") -> bytes:
    ticket = offer.params.kvferry
    epoch = epoch or ticket.lease_epoch
    message = Done(slot=ticket.lease_slot, epoch=epoch, consumer=consumer, worker=worker, expected=expected)
    return encode_notification(message)


class OtherPeer:
    """An attacker that reaches a producer's fabric and can send it anything."""

    def __init__(self, rig: Rig, producer: Engine) -> None:
        self.fabric = MemoryFabric("other", rig.network)
        self.peer = self.fabric.add_peer(producer.fabric.metadata())

    def tell(self, *messages: bytes) -> None:
        for message in messages:
            self.fabric.notify(self.peer, message)


def test_no_notification_ends_a_lease_without_its_epoch_or_stops_the_thread(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = rig.pair()
    other_peer, offer = OtherPeer(rig, producer), producer.prefill(tokens=10, seed=1)
    forged = st.builds(
        lambda worker, expected, epoch: done(offer, worker, expected, epoch=f"{epoch:015x}"),
        st.integers(0, MAX_WORKERS - 1),
        st.integers(1, MAX_WORKERS),
        st.integers(1, 2**60 - 1),
    )

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(hostile_bytes("notification") | hostile_bytes("request") | forged, max_size=8))
    def fuzz(messages: list[bytes]) -> None:
        other_peer.tell(*messages)

    with caplog.at_level(logging.WARNING):
        fuzz()
        load = consumer.load(offer.params)
        rig.step_until(lambda: load.request_id in consumer.seen.loaded, "the lease is as good as before", timeout_s=60)
        rig.step_until(lambda: offer.request_id in producer.seen.sent, "its own consumer ends it", timeout_s=60)
    assert not [record for record in caplog.records if record.exc_info]


def test_who_knows_the_epoch_can_end_that_lease_alone_and_then_no_load_of_it_is_good(rig: Rig) -> None:
    """The worst that a consumer can do with lies about its numbers: its own lease ends early, or by its time."""
    producer, consumer = rig.pair()
    other_peer, mine, other = (
        OtherPeer(rig, producer),
        producer.prefill(tokens=10, seed=1),
        producer.prefill(tokens=10, seed=2),
    )
    other_peer.tell(done(mine, worker=0, expected=MAX_WORKERS), done(mine, worker=0, expected=MAX_WORKERS))
    load = consumer.load(other.params)
    rig.step_until(lambda: other.request_id in producer.seen.sent, "the other lease ends as ever")
    assert load.request_id in consumer.seen.loaded
    assert mine.request_id not in producer.seen.sent, "one of many notifications ended it"
    other_peer.tell(done(mine, worker=3, expected=1, consumer="d" * 32))
    rig.step_until(lambda: mine.request_id in producer.seen.sent, "who knows the epoch may say that all is read")
    late = consumer.load(mine.params)
    assert rig.until_over(consumer, late) is not None, "nothing is decoded from a lease that is over"


def test_any_number_of_consumers_under_one_lease_costs_the_memory_of_eight(rig: Rig) -> None:
    producer, _ = rig.pair()
    other_peer, offer = OtherPeer(rig, producer), producer.prefill(tokens=10, seed=1)
    ticket = offer.params.kvferry
    count = 300
    for index in range(count):
        other_peer.tell(done(offer, worker=MAX_WORKERS - 1, expected=2, consumer=f"{index:032x}"))
    beyond = count - MAX_CONSUMERS
    received = producer.seen.counts
    rig.step_until(lambda: received["bad_notifications"] == beyond, "those beyond the eighth are bad", timeout_s=60)
    assert len(producer.worker._memory.table._leases[ticket.lease_slot].notifications) == MAX_CONSUMERS


def test_a_notification_at_the_limit_is_read_and_one_beyond_it_is_bad() -> None:
    body = b"\x87" + encode_notification(Done(slot=1, epoch="f" * 15, consumer="c" * 32, worker=0, expected=1))[5:]
    room = MAX_NOTIFICATION_BYTES - len(body) - len(b"\xa5later\xda\x00\x00")
    for more in (0, 1):
        text = b"x" * (room + more)
        frame = MAGIC + body + b"\xa5later\xda" + len(text).to_bytes(2, "big") + text
        if more:
            with pytest.raises(InvalidMessage, match="at most"):
                decode_notification(frame)
        else:
            assert decode_notification(frame).slot == 1
