"""Producer and consumer stand still (SIGSTOP), for a shorter or a longer time than the lease, and go on."""

from __future__ import annotations

import time

import pytest

from tests.faults.checks import (
    check_survivor,
    transfer,
    until_good,
    until_idle,
    until_over,
    warmed_up,
)
from tests.harness.fault_fabric import Point
from tests.harness.process import SLACK_S, TCP, Fleet
from tests.promises import promise

TRANSPORTS = pytest.mark.parametrize("environ", [{}, TCP], ids=["as NIXL comes", "tcp"])
LONG_LEASE_S = 20.0
SHORT_LEASE_S = 1.0
LOAD_S = 2.0
STALL_S = 1.0
POINTS = (Point.FENCE, Point.DATA, Point.SECOND_FENCE)


@promise(5)
@TRANSPORTS
@pytest.mark.parametrize("point", POINTS)
def test_a_producer_that_stands_still_for_less_than_a_lease_and_a_deadline_aborts_nothing(
    fleet: Fleet, environ: dict[str, str], point: Point
) -> None:
    """Where reads need its help they wait for it; the kernel reads from it all the same."""
    producer, consumer = fleet.pair(
        environ=environ, lease_s=LONG_LEASE_S, load_timeout_s=LONG_LEASE_S
    )
    before = warmed_up(producer, consumer)
    load = consumer.load_until(point, producer.prefill(30, 5), 5)
    producer.freeze()
    consumer.go()
    stalled(STALL_S)
    producer.thaw()
    assert until_over(consumer, load, LONG_LEASE_S + SLACK_S) is None
    until_idle(producer, SLACK_S)
    transfer(producer, consumer)
    check_survivor(consumer, before)


@promise(2, 4)
@TRANSPORTS
def test_a_producer_that_stands_still_beyond_the_deadline_fails_the_load_and_gets_its_blocks_back(
    fleet: Fleet, environ: dict[str, str]
) -> None:
    """Over TCP the read ends only when the producer goes on: until then its blocks stay out of use."""
    producer, consumer = fleet.pair(
        environ=environ, lease_s=SHORT_LEASE_S, load_timeout_s=LOAD_S
    )
    before = warmed_up(producer, consumer)
    load = consumer.load_until(Point.DATA, producer.prefill(30, 5), 5)
    producer.freeze()
    began_s = time.monotonic()
    consumer.go()
    reason = until_over(consumer, load, LOAD_S + SLACK_S)
    assert reason == ("deadline" if environ else None)
    if environ:
        in_hand = consumer.state().in_hand
        assert in_hand["quarantined"] == in_hand["alive"] == 1
        assert in_hand["blocks"], "the blocks may still be written"
        stalled(2 * SHORT_LEASE_S)
        assert consumer.state().in_hand["quarantined"] == 1, (
            "nothing but the producer can end the read"
        )
    assert time.monotonic() - began_s < LOAD_S + 2 * SHORT_LEASE_S + 2 * SLACK_S
    producer.thaw()
    until_idle(producer, SHORT_LEASE_S + SLACK_S)
    until_good(producer, consumer)
    check_survivor(consumer, before)


@promise(5)
@TRANSPORTS
@pytest.mark.parametrize("point", POINTS)
def test_a_consumer_that_stands_still_for_less_than_a_lease_loses_nothing(
    fleet: Fleet, environ: dict[str, str], point: Point
) -> None:
    producer, consumer = fleet.pair(
        environ=environ, lease_s=LONG_LEASE_S, load_timeout_s=LONG_LEASE_S
    )
    warmed_up(producer, consumer)
    before = until_idle(producer, SLACK_S)
    load = consumer.load_until(point, producer.prefill(30, 5), 5)
    consumer.freeze()
    stalled(STALL_S)
    consumer.thaw()
    consumer.go()
    assert until_over(consumer, load, LONG_LEASE_S + SLACK_S) is None
    check_survivor(producer, before)


@promise(1)
@TRANSPORTS
@pytest.mark.parametrize("point", POINTS)
def test_a_consumer_that_stands_still_for_longer_than_the_lease_finds_the_fence(
    fleet: Fleet, environ: dict[str, str], point: Point
) -> None:
    """The producer has the blocks back in time, and has given them to the next prompt: nothing of that is believed."""
    producer, consumer = fleet.pair(
        environ=environ, lease_s=SHORT_LEASE_S, load_timeout_s=LONG_LEASE_S
    )
    warmed_up(producer, consumer)
    before = until_idle(producer, SLACK_S)
    load = consumer.load_until(point, producer.prefill(30, 5), 5)
    consumer.freeze()
    until_idle(producer, SHORT_LEASE_S + SLACK_S)
    others = [
        producer.prefill(30, seed) for seed in range(6)
    ]  # of 63 blocks these take 48
    assert len(others) == 6
    consumer.thaw()
    consumer.go()
    assert until_over(consumer, load, LONG_LEASE_S + SLACK_S) == "fence"
    until_idle(producer, SHORT_LEASE_S + SLACK_S)
    until_good(producer, consumer)
    check_survivor(producer, before)


def stalled(for_s: float) -> None:
    """Let time pass: the stall itself is what is tested."""
    time.sleep(for_s)
