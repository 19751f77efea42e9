"""The request is aborted while its load stands at each point: the load is cancelled, unless it has just ended.

vLLM frees no block of such a request before the worker has reported it, so what is asserted is that every load is
reported, once, and not before it is over; that nothing is left; and that the next is good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.scheduler.requests import RemotePromptState
from tests.harness.engine import SHAPE, Engine, OrderedLoad
from tests.harness.fault_fabric import Point
from tests.harness.ledgers import check_loads
from tests.harness.rig import BOUND_S, HASTY, Rig, rig_of
from tests.promises import promise
from tests.waiting import wait_until

STAGED = replace(SHAPE, axes="bth")
"""Another order than the producer's, and short runs: everything is staged."""


@pytest.fixture(params=["memory", "nixl"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rig_of(request.param, HASTY) as made:
        yield made


def abort(consumer: Engine, load: OrderedLoad) -> None:
    """The request is aborted; no worker has reported its load."""
    consumer.loads.finished(load.request_id)
    assert consumer.loads.state(load.request_id) is RemotePromptState.ABORTED
    check_loads(consumer.loads)
    assert load.request_id not in (*consumer.seen.loaded, *consumer.seen.failed)


def check_end(
    rig: Rig, producer: Engine, consumer: Engine, load: OrderedLoad
) -> FailureReason | None:
    """It is reported once, and everything comes back."""
    reason = rig.until_over(consumer, load, BOUND_S)
    rig.settle()
    assert [*consumer.seen.loaded, *consumer.seen.failed].count(load.request_id) == 1
    assert not len(consumer.loads)
    consumer.unused += load.blocks
    rig.until_good(producer, consumer)
    rig.settle()
    return reason


@promise(2)
@pytest.mark.parametrize("shape", [SHAPE, STAGED], ids=["direct", "staged"])
@pytest.mark.parametrize(
    "point", [point for point in Point if point is not Point.IN_READ]
)
def test_aborted_at_every_point(rig: Rig, shape: Any, point: Point) -> None:
    producer, consumer = rig.engine("P"), rig.engine("C", shape=shape)
    if point is not Point.FIRST_CONTACT:
        rig.until_good(producer, consumer)
    there = threading.Event()
    consumer.fabric.stops.stop_at(point, lambda _: there.set())
    load = consumer.load(producer.prefill(10, 4).params)
    wait_until(there.is_set, f"the load is at {point.name}", BOUND_S)
    abort(consumer, load)
    consumer.step()
    consumer.fabric.stops.go()
    # At the last point it was reported before; from the others it may get to its end before the next orders are taken.
    assert check_end(rig, producer, consumer, load) in (None, FailureReason.ABORTED)


@pytest.mark.parametrize("shape", [SHAPE, STAGED], ids=["direct", "staged"])
def test_aborted_in_a_read_that_takes_its_time(rig: Rig, shape: Any) -> None:
    producer, consumer = rig.engine("P"), rig.engine("C", shape=shape)
    rig.until_good(producer, consumer)
    fabric = consumer.fabric
    fabric.stuck = True
    load = consumer.load(producer.prefill(10, 4).params)
    wait_until(lambda: fabric.reading(), "the read is under way", BOUND_S)
    abort(consumer, load)
    assert rig.until_over(consumer, load, BOUND_S) is FailureReason.ABORTED, (
        "it does not wait for the read"
    )
    assert consumer.seen.alive == {load.request_id}, "its blocks do"
    assert consumer.fabric.transfers()
    fabric.mend()
    assert check_end(rig, producer, consumer, load) is FailureReason.ABORTED


def test_an_abort_that_is_followed_by_a_failure_is_reported_once(rig: Rig) -> None:
    producer, consumer = rig.engine("P"), rig.engine("C")
    rig.until_good(producer, consumer)
    there = threading.Event()
    consumer.fabric.stops.stop_at(Point.SECOND_FENCE, lambda _: there.set())
    offer = producer.prefill(10, 4)
    load = consumer.load(offer.params)
    wait_until(there.is_set, "the data has been read", BOUND_S)
    abort(consumer, load)
    producer.give_away(offer)
    consumer.fabric.stops.go()
    assert check_end(rig, producer, consumer, load) in (
        FailureReason.FENCE,
        FailureReason.ABORTED,
    )
