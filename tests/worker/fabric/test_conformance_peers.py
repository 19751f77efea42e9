"""Peers, notifications, death of peers and `close` of every `Fabric`, tested against the fake and NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.worker.fabric.errors import (
    FabricClosed,
    InvalidFabricRequest,
    InvalidMetadata,
    PeerLost,
)
from kvferry.worker.fabric.port import (
    MAX_NOTIFICATION_BYTES,
    OpenHandles,
    TransferState,
)
from tests.worker.fabric.harness import (
    Harness,
    arrivals,
    finish,
    indices,
    random_bytes,
    region,
    row,
    rows,
)
from tests.worker.fabric.scenes import GUARD, LOST_WITHIN_S, AgentPair, Mortal

pytestmark = pytest.mark.slow

# -- peers -------------------------------------------------------------------------------------------------------


def test_a_removed_peer_can_be_added_again_and_its_old_descriptors_stay_dead(
    pair: AgentPair,
) -> None:
    local, old = pair.local(), pair.remote()
    pair.read(local, indices(0), old, indices(0))
    pair.consumer.remove_peer(pair.peer)
    pair.consumer.remove_peer(pair.peer)
    with pytest.raises(PeerLost):
        pair.consumer.post_read(local, indices(0), old, indices(0))
    with pytest.raises(PeerLost):
        pair.remote()
    assert pair.consumer.add_peer(pair.producer.metadata()) == pair.peer
    with pytest.raises(PeerLost):
        pair.consumer.post_read(local, indices(0), old, indices(0))
    pair.consumer.release(old)
    pair.read(local, indices(5), pair.remote(), indices(6))
    assert np.array_equal(pair.target[320:384], pair.source[384:448])


def test_a_read_in_flight_outlives_the_removal_of_its_peer_and_nothing_else_does(
    waiting_harness: Harness,
) -> None:
    mortal = Mortal(waiting_harness)
    mortal.read()
    mortal.target[:] = GUARD
    mortal.producer.freeze()
    transfer = mortal.post()
    mortal.consumer.remove_peer(mortal.peer)
    handles = mortal.consumer.open_handles()
    assert (handles.peers, handles.leaving) == (0, 1)
    for attempt in (mortal.post, lambda: mortal.consumer.notify(mortal.peer, b"?")):
        with pytest.raises(PeerLost):
            attempt()
    with pytest.raises(InvalidMetadata):
        mortal.consumer.add_peer(mortal.producer.metadata)
    mortal.producer.thaw()
    finish(mortal.consumer, transfer)
    assert np.array_equal(mortal.target, mortal.content)
    assert mortal.consumer.open_handles().leaving == 0
    assert mortal.consumer.add_peer(mortal.producer.metadata) == mortal.peer


def test_a_read_of_a_dead_peer_that_is_released_unpolled_keeps_the_peer_no_longer(
    waiting_harness: Harness,
) -> None:
    mortal = Mortal(waiting_harness)
    mortal.read()
    mortal.producer.freeze()
    transfer = mortal.post()
    mortal.producer.kill()
    mortal.consumer.remove_peer(mortal.peer)
    assert mortal.consumer.open_handles().leaving == 1
    mortal.consumer.release(transfer)
    assert mortal.consumer.open_handles().leaving == 0


def test_metadata_that_is_damaged_anywhere_is_refused_and_the_true_one_still_works(
    pair: AgentPair,
) -> None:
    pair.consumer.remove_peer(pair.peer)
    true = pair.producer.metadata()
    damaged = [true[:end] for end in range(len(true))]
    damaged += [
        true[:at] + bytes([true[at] ^ bit]) + true[at + 1 :]
        for at in range(len(true))
        for bit in (1, 0x80)
    ]
    damaged += [true + b"\0", b"nonsense", b"\xff" * 4096, true[:24] + b"\xff" * 8]
    for metadata in damaged:
        with pytest.raises(InvalidMetadata):
            pair.consumer.add_peer(metadata)
    assert pair.consumer.add_peer(true) == pair.peer
    pair.read(pair.local(), indices(0), pair.remote(), indices(0))
    assert np.array_equal(pair.target[:64], pair.source[:64])


@pytest.mark.parametrize(
    "metadata", [None, 7, "text", bytearray(b"KVFABRC1" + bytes(64))]
)
def test_metadata_that_is_not_bytes_is_refused(
    pair: AgentPair, metadata: bytes
) -> None:
    with pytest.raises(InvalidMetadata):
        pair.consumer.add_peer(metadata)


# -- notifications -----------------------------------------------------------------------------------------------


def test_notifications_arrive_whole_in_order_and_with_the_name_of_their_sender(
    pair: AgentPair,
) -> None:
    messages = [
        b"",
        b"\0",
        bytes(range(256)),
        b"plain",
        random_bytes(3, MAX_NOTIFICATION_BYTES).tobytes(),
    ]
    messages += [b"number %d" % number for number in range(500)]
    back = pair.producer.add_peer(pair.consumer.metadata())
    pair.producer.notify(back, b"from the producer")
    for message in messages:
        pair.consumer.notify(pair.peer, message)
    arrived = arrivals(pair.producer, len(messages))
    assert arrived == [("consumer", message) for message in messages]
    assert arrivals(pair.consumer, 1) == [("producer", b"from the producer")]
    assert pair.producer.take_notifications() == []


def test_a_notification_beyond_the_limit_is_refused_and_not_sent(
    pair: AgentPair,
) -> None:
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.notify(pair.peer, bytes(MAX_NOTIFICATION_BYTES + 1))
    pair.consumer.notify(pair.peer, b"next")
    assert arrivals(pair.producer, 1) == [("consumer", b"next")]


# -- death -------------------------------------------------------------------------------------------------------


def test_another_process_is_read_and_notified_both_ways(harness: Harness) -> None:
    mortal = Mortal(harness)
    mortal.read()
    mortal.consumer.notify(mortal.peer, b"\0done\xff")
    assert mortal.producer.received() == ("survivor", b"\0done\xff")
    mortal.producer.notify(mortal.consumer.metadata(), b"thanks\0")
    assert arrivals(mortal.consumer, 1) == [("mortal", b"thanks\0")]


def test_reading_from_a_killed_peer_raises_peer_lost_and_so_does_everything_after(
    harness: Harness,
) -> None:
    mortal = Mortal(harness)
    mortal.read()
    mortal.producer.kill()
    assert mortal.post_raises_peer_lost()
    for attempt in (
        mortal.post,
        lambda: mortal.consumer.prepare_remote(
            mortal.peer, rows((mortal.producer.address, 64, 0, 64, 1))
        ),
        lambda: mortal.consumer.notify(mortal.peer, b"?"),
    ):
        with pytest.raises(PeerLost) as lost:
            attempt()
        assert lost.value.peer == "mortal"


@pytest.mark.parametrize("name", ["mortal", "successor"])
def test_after_a_peer_died_its_successor_is_read_under_the_same_or_another_name(
    harness: Harness, name: str
) -> None:
    mortal = Mortal(harness)
    mortal.read()
    mortal.producer.kill()
    assert mortal.post_raises_peer_lost()
    mortal.consumer.release(mortal.remote)
    mortal.consumer.remove_peer(mortal.peer)
    mortal.connect(name, seed=12)
    mortal.read()


def test_a_read_from_a_frozen_peer_waits_and_lands_when_it_goes_on(
    waiting_harness: Harness,
) -> None:
    mortal = Mortal(waiting_harness)
    mortal.read()
    mortal.target[:] = GUARD
    mortal.producer.freeze()
    transfer = mortal.post()
    frozen_until = time.monotonic() + 0.1
    while time.monotonic() < frozen_until:
        assert mortal.consumer.poll(transfer) is TransferState.IN_FLIGHT
    assert mortal.consumer.telemetry(transfer) is None
    assert (mortal.target == GUARD).all()
    mortal.producer.thaw()
    finish(mortal.consumer, transfer)
    assert np.array_equal(mortal.target, mortal.content)


def test_reads_in_flight_from_a_peer_that_is_killed_raise_peer_lost_again_and_again(
    waiting_harness: Harness,
) -> None:
    mortal = Mortal(waiting_harness)
    mortal.producer.freeze()
    first, second = mortal.post(), mortal.post()
    assert mortal.consumer.poll(first) is TransferState.IN_FLIGHT
    mortal.producer.kill()
    for transfer in (first, second):
        for _ in range(2):
            with pytest.raises(PeerLost) as lost:
                finish(mortal.consumer, transfer, LOST_WITHIN_S)
            assert lost.value.peer == "mortal"
        assert mortal.consumer.telemetry(transfer) is None
        mortal.consumer.release(transfer)


# -- handles and the end -----------------------------------------------------------------------------------------


def test_release_is_idempotent_and_released_handles_are_refused(
    pair: AgentPair,
) -> None:
    local, remote = pair.local(), pair.remote()
    transfer = pair.consumer.post_read(local, indices(0), remote, indices(0))
    finish(pair.consumer, transfer)
    for handle in (transfer, local, remote):
        pair.consumer.release(handle)
        pair.consumer.release(handle)
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.poll(transfer)
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.telemetry(transfer)
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.post_read(local, indices(0), pair.remote(), indices(0))
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.post_read(pair.local(), indices(0), remote, indices(0))


def test_handles_of_another_fabric_are_refused(pair: AgentPair) -> None:
    foreign = pair.producer.prepare_local(rows(row(pair.source, 0, 64, 64, 1)))
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.post_read(foreign, indices(0), pair.remote(), indices(0))
    pair.consumer.release(foreign)
    back = pair.producer.add_peer(pair.consumer.metadata())
    theirs = pair.producer.prepare_remote(back, rows(row(pair.target, 0, 64, 64, 1)))
    finish(
        pair.producer, pair.producer.post_read(foreign, indices(0), theirs, indices(0))
    )
    assert (pair.source[:64] == GUARD).all()


def test_what_is_open_is_counted(pair: AgentPair) -> None:
    """`pair.consumer` knows one peer."""
    assert pair.consumer.open_handles() == OpenHandles(peers=1)
    local, remote = pair.local(), pair.remote()
    empty = pair.consumer.post_read(local, indices(), remote, indices())
    transfer = pair.consumer.post_read(local, indices(0), remote, indices(0))
    assert pair.consumer.open_handles() == OpenHandles(transfers=2, prepared=2, peers=1)
    finish(pair.consumer, transfer)
    assert pair.consumer.open_handles().transfers == 2, (
        "what is done is open until it is released"
    )
    for _ in range(2):
        pair.consumer.release(transfer)
        pair.consumer.release(empty)
        pair.consumer.release(local)
    assert pair.consumer.open_handles() == OpenHandles(prepared=1, peers=1)
    pair.consumer.remove_peer(pair.peer)
    pair.consumer.remove_peer(pair.peer)
    assert pair.consumer.open_handles() == OpenHandles(prepared=1), (
        "a peer's lists are the caller's"
    )
    pair.consumer.release(remote)
    assert pair.consumer.open_handles() == OpenHandles()
    pair.consumer.add_peer(pair.producer.metadata())
    pair.local()
    pair.consumer.close()
    assert pair.consumer.open_handles() == OpenHandles(), (
        "it can be called after `close` too"
    )


def test_close_is_idempotent_and_everything_after_it_is_refused(
    pair: AgentPair,
) -> None:
    local, remote = pair.local(), pair.remote()
    transfer = pair.consumer.post_read(local, indices(0), remote, indices(0))
    finish(pair.consumer, transfer)
    consumer, metadata, nearby = (
        pair.consumer,
        pair.producer.metadata(),
        rows(row(pair.target, 0, 1, 1, 1)),
    )
    consumer.close()
    consumer.close()
    attempts: list[Callable[[], object]] = [
        lambda: consumer.register([region(pair.target)]),
        consumer.metadata,
        lambda: consumer.add_peer(metadata),
        lambda: consumer.remove_peer(pair.peer),
        lambda: consumer.prepare_local(nearby),
        lambda: consumer.prepare_remote(pair.peer, nearby),
        lambda: consumer.post_read(local, indices(0), remote, indices(0)),
        lambda: consumer.poll(transfer),
        lambda: consumer.telemetry(transfer),
        lambda: consumer.notify(pair.peer, b""),
        consumer.take_notifications,
    ]
    for attempt in attempts:
        with pytest.raises(FabricClosed):
            attempt()
    for handle in (transfer, local, remote):
        consumer.release(handle)
