"""A router that replays params, or delivers them twice."""

from __future__ import annotations

import pytest

from tests.faults.checks import transfer, until_idle, until_over, warmed_up
from tests.harness.child import Start
from tests.harness.fault_fabric import Point
from tests.harness.process import SLACK_S, Fleet
from tests.ports import free_port
from tests.promises import promise


@promise(1, 4)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_params_of_an_engines_former_life_are_refused_and_touch_no_lease_of_the_new_one(
    fleet: Fleet, known: bool
) -> None:
    """The new life has a lease in the very slot that the old params name."""
    start = Start(name="P", port=free_port())
    consumer, former = fleet.start(Start(name="C", port=free_port()), start)
    if known:
        transfer(former, consumer)
    old = former.prefill(13, 5)
    former.kill()
    (producer,) = fleet.start(start)
    new = producer.prefill(13, 6)
    assert new["kvferry"]["lease_slot"] == old["kvferry"]["lease_slot"]
    reason = until_over(consumer, consumer.load(old, 5), 2 * SLACK_S)
    assert reason == ("transfer" if known else "refused")
    until_idle(consumer, SLACK_S)  # the release has been sent
    assert producer.state().in_hand["leases"] == 1
    assert until_over(consumer, consumer.load(new, 6), SLACK_S) is None
    until_idle(producer, SLACK_S)
    assert consumer.answer(consumer.load(new, 6))["computed"] == "lease_over"
    transfer(producer, consumer)


@promise(1)
@pytest.mark.parametrize(
    "point",
    [Point.FIRST_CONTACT, Point.FENCE, Point.DATA, Point.SECOND_FENCE, Point.DONE],
)
def test_the_same_params_at_two_consumers_are_read_by_one_and_at_most_fenced_for_the_other(
    fleet: Fleet, point: Point
) -> None:
    """The first to finish ends the lease; the one that was on its way meanwhile sees that, unless it was past it."""
    starts = [Start(name=name, port=free_port()) for name in ("P", "slow", "quick")]
    producer, slow, quick = fleet.start(*starts)
    warmed_up(producer, quick)
    if point is not Point.FIRST_CONTACT:
        warmed_up(producer, slow)
    params = producer.prefill(13, 5)
    load = slow.load_until(point, params, 5)
    assert until_over(quick, quick.load(params, 5), SLACK_S) is None
    until_idle(producer, SLACK_S)
    slow.go()
    assert until_over(slow, load, SLACK_S) == (None if point is Point.DONE else "fence")
    for consumer in (quick, slow):
        until_idle(consumer, SLACK_S)
        transfer(producer, consumer)
