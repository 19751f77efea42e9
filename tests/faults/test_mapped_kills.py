"""Engines that read each other's mapped memory are killed at every point of a load, in the middle of a copy too."""

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
from tests.harness.process import SLACK_S, EngineProcess, Fleet
from tests.ports import free_port
from tests.promises import promise
from tests.waiting import wait_until

LEASE_S = 1.0
FILES = "/memfd:kvferry-"
POINTS = (Point.DATA, Point.IN_READ, Point.SECOND_FENCE, Point.DONE)
"""What is read over the fabric are the slots of the first contact alone."""
AXES = pytest.mark.parametrize("axes", ["bht", "htb"], ids=["equal", "another layout"])
UNMAPPED_S = 1.0
"""From the death of a producer until nothing of its memory is mapped."""


def stop_load(producer: EngineProcess, consumer: EngineProcess, point: Point) -> int:
    """Bring a load to a point, and to a standstill there; its number."""
    consumer.stop_at(point)
    load = consumer.load(producer.prefill(13, 5), 5)
    consumer.until_at(point)
    return load


def until_free(consumer: EngineProcess, own: int) -> float:
    """Wait until the consumer maps nothing but its own files; the seconds that it took."""
    began_s = time.monotonic()
    wait_until(
        lambda: consumer.maps_of(FILES) == own,
        "its memory is free",
        UNMAPPED_S + SLACK_S,
    )
    return time.monotonic() - began_s


@promise(1, 4)
@AXES
def test_a_load_from_a_producer_that_is_killed_has_the_right_bytes_and_nothing_stays_mapped(
    fleet: Fleet, axes: str
) -> None:
    """What it promised stays as it was in the memory of a process that is gone. It comes back at its address."""
    start = Start(name="P", port=free_port(), shared=True)
    consumer = fleet.engine("C", axes=axes, shared=True)
    own = consumer.maps_of(FILES)
    (producer,) = fleet.start(start)
    before = warmed_up(producer, consumer)
    mapped = consumer.maps_of(FILES)
    assert mapped > own
    took_s: list[float] = []
    for point in POINTS:
        load = stop_load(producer, consumer, point)
        producer.kill()
        consumer.go()
        assert until_over(consumer, load, SLACK_S) is None, f"killed at {point.name}"
        took_s.append(until_free(consumer, own))
        (producer,) = fleet.start(start)
        transfer(producer, consumer)
        assert consumer.maps_of(FILES) == mapped, "the memory of the new one is mapped"
        check_survivor(consumer, before)
    # A busy machine makes it longer, and never shorter.
    assert min(took_s) <= UNMAPPED_S, took_s


@promise(4)
def test_a_producer_that_is_killed_between_two_loads_is_noticed_before_the_next(
    fleet: Fleet,
) -> None:
    consumer = fleet.engine("C", shared=True)
    own = consumer.maps_of(FILES)
    (producer,) = fleet.start(Start(name="P", port=free_port(), shared=True))
    before = warmed_up(producer, consumer)
    params = producer.prefill(13, 5)
    producer.kill()
    until_free(consumer, own)
    assert until_over(consumer, consumer.load(params, 5), SLACK_S) in (
        "transfer",
        "handshake",
    )
    check_survivor(consumer, before)


@promise(3)
def test_consumers_that_are_killed_in_a_copy_cost_the_producer_a_lease_and_no_more(
    fleet: Fleet,
) -> None:
    starts = [
        Start(name=f"C{number}", port=free_port(), shared=True) for number in range(5)
    ]
    producer, spare, *consumers = fleet.start(
        Start(name="P", port=free_port(), shared=True, lease_s=LEASE_S), *starts
    )
    warmed_up(producer, spare)
    before = until_idle(producer, SLACK_S)
    for consumer in consumers:
        until_good(producer, consumer)
    for consumer, point in zip(consumers, POINTS, strict=True):
        stop_load(producer, consumer, point)
    for consumer in consumers:
        consumer.kill()
    until_idle(producer, LEASE_S + SLACK_S)
    until_good(producer, spare)
    check_survivor(producer, before)


def test_a_load_goes_on_although_its_producer_stands_still(fleet: Fleet) -> None:
    producer, consumer = fleet.pair(shared=True)
    warmed_up(producer, consumer)
    params = producer.prefill(13, 5)
    # A producer that is stopped before that never lets the load begin.
    wait_until(
        lambda: producer.ask("is_ready", request_id=params["remote_request_id"]),
        "the prompt may be read",
        SLACK_S,
    )
    producer.freeze()
    assert until_over(consumer, consumer.load(params, 5), SLACK_S) is None
    producer.thaw()
    until_idle(producer, SLACK_S)
