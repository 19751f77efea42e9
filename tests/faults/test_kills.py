"""Producer and consumer are killed at every point of a load: what the survivor reports, how soon, and what is left."""

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
from tests.harness.child import Start
from tests.harness.fault_fabric import Point
from tests.harness.process import SLACK_S, TCP, EngineProcess, Fleet
from tests.ports import free_port
from tests.promises import promise

LEASE_S = 1.0
HANDSHAKE_S = 15.0
"""Longer than a starved machine takes for one. Only a producer that stands still lets a consumer wait for so long, and
these are dead: their ports are closed."""
TRANSPORTS = pytest.mark.parametrize("environ", [{}, TCP], ids=["as NIXL comes", "tcp"])
REASONS: dict[Point, set[str | None]] = {
    Point.FIRST_CONTACT: {"handshake", "transfer"},
    Point.FENCE: {"transfer"},
    Point.DATA: {"transfer"},
    Point.IN_READ: {"transfer"},
    Point.SECOND_FENCE: {"transfer"},
    Point.DONE: {None},
}
"""Where the producer dies, and what becomes of the load."""


def points(environ: dict[str, str]) -> list[Point]:
    """Points at which an engine can die. The kernel copies at once: only a read that needs the producer takes time."""
    return [point for point in Point if point is not Point.IN_READ or environ == TCP]


def stop_load(producer: EngineProcess, consumer: EngineProcess, point: Point) -> int:
    """Bring a load to a point, and to a standstill there; its number. In a read, the producer stands still too."""
    consumer.stop_at(Point.DATA if point is Point.IN_READ else point)
    load = consumer.load(producer.prefill(13, 5), 5)
    if point is Point.IN_READ:
        consumer.until_at(Point.DATA)
        producer.freeze()
        consumer.go_on_to(point)
    consumer.until_at(point)
    return load


@promise(4)
@TRANSPORTS
def test_a_producer_that_is_killed_at_any_point_fails_that_load_and_no_later_one(
    fleet: Fleet, environ: dict[str, str]
) -> None:
    """One consumer survives producers that die at each point in turn; each comes back at the address of the last."""
    start = Start(name="P", port=free_port(), environ=environ)
    consumer = fleet.engine("C", environ=environ, handshake_timeout_s=HANDSHAKE_S)
    (producer,) = fleet.start(start)
    before = warmed_up(producer, consumer)
    for point in points(environ):
        if point is Point.FIRST_CONTACT:  # the next producer is not connected yet
            producer.kill()
            (producer,) = fleet.start(start)
        load = stop_load(producer, consumer, point)
        producer.kill()
        consumer.go()
        reason = until_over(consumer, load, HANDSHAKE_S + SLACK_S)
        assert reason in REASONS[point], f"killed at {point.name}: {reason}"
        (producer,) = fleet.start(start)
        transfer(producer, consumer)
        check_survivor(consumer, before)


@promise(4)
@TRANSPORTS
def test_a_producer_that_is_killed_between_two_loads_fails_the_next(
    fleet: Fleet, environ: dict[str, str]
) -> None:
    """The consumer, which may know the producer, is not notified of the death."""
    start = Start(name="P", port=free_port(), environ=environ)
    consumer = fleet.engine("C", environ=environ, handshake_timeout_s=HANDSHAKE_S)
    (producer,) = fleet.start(start)
    before = warmed_up(producer, consumer)
    for known in (True, False):
        params = producer.prefill(13, 5)
        producer.kill()
        began_s = time.monotonic()
        reason = until_over(consumer, consumer.load(params, 5), HANDSHAKE_S + SLACK_S)
        assert reason == ("transfer" if known else "handshake")
        if not known:
            assert time.monotonic() - began_s < HANDSHAKE_S, (
                "a closed port is known as closed"
            )
        (producer,) = fleet.start(start)
        if not known:
            transfer(producer, consumer)
    check_survivor(consumer, before)


@promise(3)
@TRANSPORTS
def test_consumers_that_are_killed_at_every_point_cost_the_producer_a_lease_and_no_more(
    fleet: Fleet, environ: dict[str, str]
) -> None:
    """They die all at once, each somewhere else, one before it has shaken hands: the leases run out.

    Not in a read over TCP: UCX serves that with the producer's own help, and a producer that stood still meanwhile is
    ended by UCX when it goes on and cannot send ("Fatal: unexpected error: Endpoint timeout", UCX 1.23).
    """
    stops = [point for point in Point if point is not Point.IN_READ]
    starts = [
        Start(name=f"C{number}", port=free_port(), environ=environ)
        for number in range(len(stops) + 2)
    ]
    producer, spare, idle, *consumers = fleet.start(
        Start(name="P", port=free_port(), environ=environ, lease_s=LEASE_S), *starts
    )
    warmed_up(producer, spare)
    before = until_idle(producer, SLACK_S)
    known = [
        c
        for c, point in zip(consumers, stops, strict=True)
        if point is not Point.FIRST_CONTACT
    ]
    for consumer in known:
        until_good(producer, consumer)
    assert (
        idle.ask("accept", request_id="waits", params=producer.prefill(13, 4)) is None
    )
    for consumer, point in zip(consumers, stops, strict=True):
        stop_load(producer, consumer, point)
    for consumer in (idle, *consumers):
        consumer.kill()
    until_idle(producer, LEASE_S + SLACK_S)
    until_good(producer, spare)
    check_survivor(producer, before)
