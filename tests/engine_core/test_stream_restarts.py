"""A prompt that is read while it is computed is preempted, or its caches are about to change."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.protocol.slots import (
    SlotState,
)
from tests.engine_core.streamed import (
    PROMPT,
    REMOTE_DECODE,
    ask,
    asked_for,
    free_rows,
    is_over,
    lease_of,
    published,
)
from tests.harness.core.node import Node
from tests.harness.core.scheduler import Scheduled, tokens
from tests.harness.exported import slots_of


def crowded(make: Any, overlap: bool) -> tuple[Node, Scheduled, list[Scheduled]]:
    """A producer that preempts a streamed prompt, since requests before it need blocks: the step in which it does, and
    those before."""
    producer: Node = make(
        "kv_producer", max_step_tokens=20, num_blocks=23, overlap=overlap
    )
    for n in range(4):
        producer.engine.add(f"answer{n}", tokens(20, seed=20 + n), max_tokens=24)
    for _ in range(6):
        producer.step()
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.step()
    ask(producer, "p")
    steps: list[Scheduled] = []
    while not (steps and steps[-1].output.preempted_req_ids):
        steps.append(producer.step())
        assert len(steps) < 40
    return producer, steps[-1], steps[:-1]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
def test_a_preempted_prompt_has_a_new_epoch_before_the_step_that_gives_its_blocks_away(
    make: Any, overlap: bool
) -> None:
    producer, step, before = crowded(make, overlap)
    orders = [
        order
        for earlier in before
        if earlier.orders
        for order in earlier.orders.progress
    ]
    blocks = {block for order in orders for block in order.blocks[0]}
    given = {
        block for n in range(4) for block in producer.engine.block_ids(f"answer{n}")
    }
    assert blocks & given, "none of its blocks were given away in that step"
    (reopened,) = step.orders.opens
    assert (reopened.slot, reopened.row, reopened.origin) == (
        orders[0].slot,
        orders[0].row,
        orders[0].epoch,
    )
    assert reopened.epoch != orders[0].epoch
    word = slots_of(producer.ferry_workers[0]).words[reopened.slot]
    assert int(word) == int(reopened.epoch, 16) << 4 | SlotState.COMPUTING
    later: list[Scheduled] = []
    while not any(one.orders and one.orders.completions for one in later):
        later.append(producer.step())
        assert len(later) < 60
    orders = [order for one in later if one.orders for order in one.orders.progress]
    assert {(order.epoch, order.origin, order.row) for order in orders} == {
        (reopened.epoch, reopened.origin, reopened.row)
    }
    assert orders[0].first_blocks == (0,)
    lease = lease_of(producer)
    assert [block for order in orders for block in order.blocks[0]] == list(
        lease.block_ids
    )
    assert lease.origin.epoch == reopened.origin
    params = producer.answer("p").params
    assert params is not None
    assert params["kvferry"]["lease_epoch"] == reopened.epoch
    assert producer.engine.connector.scheduler_side.leases.release(lease.origin)
    producer.until(lambda: is_over(producer))
    assert producer.engine.counted("stream_restarts") == 1


def test_a_preempted_prompt_that_goes_on_in_the_same_step_is_published_from_the_beginning(
    make: Any,
) -> None:
    producer = asked_for(make)
    producer.step()
    before = lease_of(producer).name
    producer.engine.preempt("p", drops_output=True)
    step = producer.step()
    ((tokens_now, first, _),) = published(step)
    assert (tokens_now, first) == (128 + 64, (0,)), "the prefix cache has its blocks"
    assert lease_of(producer).name != before
    assert (
        step.orders.progress[0].epoch
        == step.orders.opens[0].epoch
        == lease_of(producer).name.epoch
    )


@pytest.mark.parametrize("change", ["fewer tokens", "other blocks"])
def test_a_prompt_whose_published_blocks_do_not_hold_any_more_gets_a_new_epoch(
    make: Any, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = asked_for(make)
    producer.step()
    before = lease_of(producer).name
    if change == "fewer tokens":
        producer.engine.scheduler.requests["p"].num_computed_tokens = 100
    else:
        side = producer.engine.connector.scheduler_side
        table = side.blocks.table
        monkeypatch.setattr(
            side.blocks, "table", lambda name: ([99, *table(name)[0][1:]],)
        )
    orders = producer.engine.schedule().orders
    assert (
        [order.epoch for order in orders.opens]
        == [lease_of(producer).name.epoch]
        != [before.epoch]
    )
    assert orders.progress[0].first_blocks == (0,)


def test_a_change_of_the_caches_ends_a_stream(make: Any) -> None:
    """Its epoch never becomes READY: its first blocks are of the old weights."""
    producer = asked_for(make)
    producer.step()
    name = lease_of(producer).name
    side = producer.engine.connector.scheduler_side
    side.life.reset()
    assert free_rows(producer) == 64
    step = producer.step()
    assert [(end.slot, end.epoch) for end in step.orders.ends] == [
        (name.slot, name.epoch)
    ]
    assert not step.orders.progress
    assert producer.answer("p").params is None
    producer.until(lambda: is_over(producer))


def test_a_stream_that_a_reset_has_ended_gets_another_lease_and_is_not_streamed_again(
    make: Any,
) -> None:
    producer = asked_for(make)
    producer.step()
    before = lease_of(producer).name
    producer.engine.preempt("p", drops_output=True)
    producer.engine.connector.scheduler_side.life.reset()
    steps = [producer.step() for _ in range(4)]
    assert not any(step.orders and step.orders.progress for step in steps)
    params = producer.answer("p").params
    assert params is not None
    assert params["kvferry"]["lease_epoch"] != before.epoch


def test_a_request_that_is_computed_again_after_its_last_step_keeps_its_lease(
    make: Any,
) -> None:
    """vLLM drops the step's output when it empties its prefix cache, and for some other connectors beside this one."""
    producer = asked_for(make, overlap=True)
    for _ in range(3):
        producer.step()
    lease = lease_of(producer)
    blocks = lease.block_ids
    producer.engine.preempt("p", drops_output=True)
    params = producer.answer("p").params
    assert params is not None
    assert (params["remote_block_ids"], params["kvferry"]["lease_epoch"]) == (
        [list(blocks)],
        lease.origin.epoch,
    )
