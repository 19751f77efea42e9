"""Notifications to producers that are lost, duplicated, reordered or forged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.protocol.notifications import MAGIC, Done, encode_notification
from kvferry.worker.fabric.nixl import NixlFabric
from tests.faults.checks import check_survivor, transfer, until_good, until_idle, until_over, warmed_up
from tests.harness.cache_engine import HOST
from tests.harness.fault_fabric import Delivery, Point
from tests.harness.handshake import fetch_description
from tests.harness.process import SLACK_S, EngineProcess, Fleet
from tests.waiting import wait_until

LEASE_S = 2.0
OTHER_BOOT = "f" * 32


def test_a_lost_done_costs_the_producer_a_lease_and_no_more(fleet: Fleet) -> None:
    producer, consumer = fleet.pair(lease_s=LEASE_S)
    warmed_up(producer, consumer)
    before = until_idle(producer, SLACK_S)
    consumer.deliver(Delivery.NEVER)
    loads = [consumer.load(producer.prefill(13, seed), seed) for seed in range(3)]
    assert [until_over(consumer, load, LEASE_S + SLACK_S) for load in loads] == [None] * 3
    assert producer.state().in_hand["leases"], "no notification has arrived"
    until_idle(producer, LEASE_S + SLACK_S)
    consumer.deliver(Delivery.ONCE)
    until_good(producer, consumer)
    check_survivor(producer, before)


def test_a_done_that_comes_twice_counts_once(fleet: Fleet) -> None:
    """While others hold leases, so that both are processed: the second one is late, and frees no other blocks."""
    producer, consumer = fleet.pair()
    warmed_up(producer, consumer)
    held = producer.prefill(13, 9)
    consumer.deliver(Delivery.TWICE)
    for seed in range(4):
        assert until_over(consumer, consumer.load(producer.prefill(13, seed), seed), SLACK_S) is None
    wait_until(lambda: producer.state().counts.get("late_notifications") == 4, "all of them have arrived")
    assert producer.state().in_hand["leases"] == 1
    consumer.deliver(Delivery.ONCE)
    assert until_over(consumer, consumer.load(held, 9), SLACK_S) is None
    until_idle(producer, SLACK_S)


def test_dones_in_another_order_free_each_its_own(fleet: Fleet) -> None:
    producer, consumer = fleet.pair()
    warmed_up(producer, consumer)
    consumer.deliver(Delivery.REVERSED)
    loads = [consumer.load(producer.prefill(tokens, seed=tokens), seed=tokens) for tokens in (3, 40)]
    assert [until_over(consumer, load, SLACK_S) for load in loads] == [None] * 2
    until_idle(producer, SLACK_S)
    assert not producer.state().counts
    consumer.deliver(Delivery.ONCE)
    transfer(producer, consumer)


@contextlib.contextmanager
def forger(producer: EngineProcess) -> Iterator[Any]:
    """An unknown agent, and how it sends to the producer."""
    description = fetch_description(HOST, producer.port, "P", "forger", SLACK_S)
    with contextlib.closing(NixlFabric("forger")) as fabric:
        peer = fabric.add_peer(description.workers[0].agent_metadata)
        yield lambda message: fabric.notify(peer, message)


def forged(params: dict[str, Any]) -> dict[str, tuple[bytes, str]]:
    """Notifications without the epoch, or from one of several readers, and the counter of each."""
    ticket = params["kvferry"]
    done = Done(slot=ticket["lease_slot"], epoch="1" * 15, consumer=OTHER_BOOT, worker=0, expected=1)
    knowing = {"epoch": ticket["lease_epoch"], "consumer": OTHER_BOOT, "worker": 0}
    good = encode_notification(done)
    return {
        "another epoch": (good, "late_notifications"),
        "another slot": (encode_notification(Done(slot=60, expected=1, **knowing)), "late_notifications"),
        "one of two readers": (encode_notification(Done(slot=ticket["lease_slot"], expected=2, **knowing)), ""),
        "cut": (good[:-3], "bad_notifications"),
        "empty": (b"", "bad_notifications"),
        "only the magic": (MAGIC, "bad_notifications"),
        "another magic": (b"KVF9" + good[4:], "bad_notifications"),
        "of NixlConnector": (b"request-1:2", "bad_notifications"),
        "too long": (MAGIC + bytes(60_000), "bad_notifications"),
        "not UTF-8": (bytes(range(256)), "bad_notifications"),
    }


def test_forged_dones_free_nothing(fleet: Fleet) -> None:
    """Each of them a hundred times: a thousand in all."""
    producer, consumer = fleet.pair()
    warmed_up(producer, consumer)
    params = producer.prefill(13, 9)
    expected: dict[str, int] = {}
    with forger(producer) as send:
        for message, counted in forged(params).values():
            for _ in range(100):
                send(message)
            expected[counted] = expected.get(counted, 0) + 100
        expected.pop("")
        wait_until(lambda: producer.state().counts == expected, "all of them have been ignored", 4 * SLACK_S)
        assert producer.state().in_hand["leases"] == 1, "the lease is held"
        assert until_over(consumer, consumer.load(params, 9), SLACK_S) is None
        until_idle(producer, SLACK_S)
    transfer(producer, consumer)


@pytest.mark.parametrize("point", [Point.FENCE, Point.DATA, Point.SECOND_FENCE])
def test_a_done_forged_with_the_right_epoch_is_found_by_the_fence(fleet: Fleet, point: Point) -> None:
    """A sender with the ticket can end the lease, as it can by a release; bytes read afterwards are not accepted."""
    producer, consumer = fleet.pair()
    warmed_up(producer, consumer)
    params = producer.prefill(13, 9)
    ticket = params["kvferry"]
    load = consumer.load_until(point, params, 9)
    with forger(producer) as send:
        send(
            encode_notification(
                Done(slot=ticket["lease_slot"], epoch=ticket["lease_epoch"], consumer=OTHER_BOOT, worker=0, expected=1)
            )
        )
        until_idle(producer, SLACK_S)
    consumer.go()
    assert until_over(consumer, load, SLACK_S) == "fence"
    transfer(producer, consumer)
