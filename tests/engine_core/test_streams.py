"""A producer publishes a prompt that a consumer has asked for, step by step, until it is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.params import decode_params, request_key
from kvferry.protocol.queries import PromptProgress, PromptQuery
from kvferry.protocol.slots import (
    MAX_PROGRESS,
)
from kvferry.scheduler.requests import LeaseState, ProducerLease
from tests.engine_core.streamed import (
    PROMPT,
    REMOTE_DECODE,
    answer_to,
    ask,
    asked_for,
    free_rows,
    is_over,
    lease_of,
    published,
    ticket,
)
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.scheduler import tokens
from tests.harness.exported import slots_of
from tests.harness.integrity import check_worker
from tests.waiting import wait_until


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
def test_every_step_publishes_what_it_computes_from_the_next_one_after_the_question(
    make: Any, overlap: bool
) -> None:
    producer = asked_for(make, overlap=overlap)
    steps = [producer.step() for _ in range(3)]
    assert [published(step) for step in steps] == [
        [(128, (0,), 8)],
        [(192, (8,), 4)],
        [(200, (12,), 1)],
    ]
    blocks = [
        block
        for step in steps
        for order in step.orders.progress
        for block in order.blocks[0]
    ]
    (hold,) = steps[-1].orders.completions
    (lease,) = (
        producer.engine.connector.scheduler_side.leases.block_references.held.values()
    )
    assert blocks == list(lease.block_ids)
    orders = [order for step in steps for order in step.orders.progress]
    assert {(order.slot, order.epoch, order.origin) for order in orders} == {
        (hold.slot, hold.epoch, hold.epoch)
    }
    params = producer.answer("p").params
    assert params is not None
    assert (params["remote_block_ids"], params["kvferry"]["stream_row"]) == (
        [blocks],
        None,
    )
    producer.engine.connector.scheduler_side.leases.release(lease.name)
    producer.until(lambda: is_over(producer))
    assert producer.engine.counted("streams") == 1


def test_the_ticket_comes_with_the_first_of_these_steps_and_lists_no_blocks(
    make: Any,
) -> None:
    producer = asked_for(make)
    producer.step()
    params = ticket(producer)
    lease = lease_of(producer)
    assert lease.stream is not None
    assert params.kvferry.stream_row == lease.stream.row
    assert (params.kvferry.lease_slot, params.kvferry.lease_epoch) == (
        lease.slot,
        lease.origin.epoch,
    )
    assert (params.remote_block_ids, params.remote_num_tokens) == (((),), len(PROMPT))
    assert params.kvferry.digests == digest_chain(Prompt(tokens=PROMPT))
    assert params.kvferry.held_from == (0,)


def test_a_prompt_that_nobody_has_asked_for_is_not_published(make: Any) -> None:
    producer: Node = make("kv_producer", max_step_tokens=64)
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    assert not any(
        step.orders and step.orders.progress
        for step in [producer.step() for _ in range(4)]
    )
    assert producer.engine.answers["p"].params is not None


def test_a_prompt_that_the_next_step_completes_gets_the_plain_ticket(make: Any) -> None:
    producer = asked_for(make, max_step_tokens=128)
    step = producer.step()
    assert (step.orders.progress, len(step.orders.completions)) == ((), 1)
    assert ticket(producer).kvferry.stream_row is None
    assert free_rows(producer) == 64


def test_blocks_that_another_prompt_computes_in_the_same_step_count_when_that_step_has_run(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reports them as computed to the second prompt in the `schedule()` that gives them to the first."""
    producer: Node = make("kv_producer", max_step_tokens=128)
    prompts = {"a": PROMPT[:70], "b": [*PROMPT[:64], *tokens(120, seed=9)]}
    for number, (name, prompt) in enumerate(prompts.items()):
        producer.engine.add(name, prompt, REMOTE_DECODE, max_tokens=1)
        ask(producer, name, prompt, number=number)
    worker = ferry_of(producer.workers[0]).worker_side
    with monkeypatch.context() as changed:
        changed.setattr(
            "kvferry.connector.worker_side.side.WorkerSide.end_step", lambda side: None
        )
        step = producer.step()
        assert step.computed == {"a": 70, "b": 58}
        assert published(step) == [(122, (0,), 8)]
        slot = lease_of(producer, "b").slot
        progress = slots_of(worker.worker).progress
        check_worker(worker.worker)  # the transfer thread has taken the orders
        assert int(progress[slot]) & MAX_PROGRESS == 0
    worker.end_step()
    wait_until(
        lambda: int(progress[slot]) & MAX_PROGRESS == 122, "all tokens are reported"
    )


def test_blocks_of_a_window_are_published_when_the_prompt_is_complete(
    make: Any,
) -> None:
    """Those of the tokens from 160 on, which the last one needs at least; the last step of 8 tokens needs more."""
    producer = asked_for(make, window=40)
    steps = [producer.step() for _ in range(3)]
    windows = [order.blocks[1] for step in steps for order in step.orders.progress]
    held = ticket(producer)
    assert held.kvferry.held_from == (0, 144)
    assert windows == [(), (), held.remote_block_ids[1][1:]]
    assert len(windows[2]) == 3


@pytest.mark.parametrize(("span", "is_streamed"), [(16, True), (32, True), (64, False)])
def test_a_prompt_is_not_streamed_where_its_window_may_not_reach_back_to_the_consumers_block(
    make: Any, span: int, is_streamed: bool
) -> None:
    """Of 200 tokens, the last 40 in blocks of 16 reach back to 160, those of 64 to 128: only the step that completes
    the prompt decides whether they are held. Then the plain ticket says it."""
    producer: Node = make("kv_producer", max_step_tokens=64, window=40)
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.step()
    digest = digest_chain(Prompt(tokens=PROMPT))[-1]
    query = PromptQuery(
        number=1,
        key=request_key("p"),
        num_tokens=len(PROMPT),
        digest=digest,
        spans=(span, span),
    )
    answer_to(producer, query)
    steps = [producer.step() for _ in range(3)]
    assert any(step.orders and step.orders.progress for step in steps) == is_streamed
    ticket = decode_params(answer_to(producer, query).params).kvferry
    assert (ticket.stream_row, ticket.held_from) == (None, (0, 144))
    assert producer.engine.counted("streams_refused", "window") == (not is_streamed)


def test_blocks_of_a_state_are_published_when_the_request_has_ended(
    make_engine: Any,
) -> None:
    """Its last token is the consumer's; the state is in the last block that the request has then."""
    engine = make_engine(states=1, max_step_tokens=64)
    node = cast("Node", SimpleNamespace(engine=engine))
    engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    engine.step()
    assert ask(node, "p").progress is PromptProgress.QUEUED
    steps = [engine.step() for _ in range(3)]
    listed = [order for step in steps for order in step.orders.progress]
    assert [
        (order.tokens, len(order.blocks[0]), order.blocks[1]) for order in listed
    ] == [
        (128, 8, ()),
        (192, 4, ()),
        (199, 1, ()),
    ]
    answer = engine.answers["p"].params
    assert ticket(node).kvferry.digests == digest_chain(Prompt(tokens=PROMPT), 199)
    (last,) = engine.step(over=()).orders.progress
    (hold,) = engine.connector.scheduler_side.leases.leases(LeaseState.HELD)
    assert (last.tokens, last.first_blocks, last.blocks[0]) == (199, (13, 0), ())
    assert list(last.blocks[1]) == answer["remote_block_ids"][1][-1:]
    assert set(last.blocks[1]) <= set(hold.block_ids)


@pytest.mark.parametrize(("length", "window"), [(136, 8), (152, 40), (200, 40)])
def test_a_ticket_promises_no_more_of_a_window_than_is_held_when_the_request_has_ended(
    make_engine: Any, length: int, window: int
) -> None:
    """Where there are states: by then vLLM has freed what the next token does not need."""
    engine, prompt = (
        make_engine(states=1, window=window, max_step_tokens=64),
        PROMPT[:length],
    )
    node = cast("Node", SimpleNamespace(engine=engine))
    engine.add("p", prompt, REMOTE_DECODE, max_tokens=1)
    engine.step()
    ask(node, "p", prompt)
    engine.step()
    promised = ticket(node, "p", prompt).kvferry
    assert promised.stream_row is not None
    engine.run()
    held = engine.answers["p"].params["kvferry"]["held_from"]
    assert held[1] <= promised.held_from[1]


def test_a_state_whose_request_is_preempted_after_its_last_step_begins_anew(
    make_engine: Any,
) -> None:
    engine = make_engine(states=1, max_step_tokens=64)
    node = cast("Node", SimpleNamespace(engine=engine))
    engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    engine.step()
    ask(node, "p")
    for _ in range(2):
        engine.step()
    epoch = lease_of(node).name.epoch
    last = engine.schedule()
    assert [order.tokens for order in last.orders.progress] == [199]
    node.engine.preempt("p", drops_output=True)
    step = engine.schedule()
    assert [(opened.slot, opened.epoch != epoch) for opened in step.orders.opens] == [
        (lease_of(node).slot, True)
    ]


def test_with_all_rows_used_a_prompt_is_read_when_it_is_complete(make: Any) -> None:
    producer = asked_for(make)
    streams = producer.engine.connector.scheduler_side.leases.streams
    others = [ProducerLease(f"other-{row}") for row in range(len(streams.free_rows))]
    for other in others:
        assert streams.begin(other) is not None
    assert not any(
        step.orders and step.orders.progress
        for step in [producer.step() for _ in range(3)]
    )
    assert ticket(producer).kvferry.stream_row is None
    for other in others:
        assert other.stream is not None
        streams.end(other, other.stream)
    producer.step()
    assert producer.engine.counted("streams_refused", "rows") == 1


@pytest.mark.parametrize(
    ("reason", "config", "streams"),
    [("engine", {"extra": {"streaming": "off"}}, True), ("consumer", {}, False)],
    ids=["switched off", "the consumer's is switched off"],
)
def test_engines_that_do_not_stream_give_the_plain_ticket(
    make: Any, reason: str, config: dict[str, Any], streams: bool
) -> None:
    producer: Node = make("kv_producer", max_step_tokens=64, **config)
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    ask(producer, "p", streams=streams)
    steps = [producer.step() for _ in range(5)]
    assert not any(step.orders and step.orders.progress for step in steps)
    assert ticket(producer).kvferry.stream_row is None
    assert (
        producer.engine.counted("streams_refused")
        == producer.engine.counted("streams_refused", reason)
        == 1
    )
