"""A child of a MultiConnector beside one that holds blocks at a request's end: aborts while a prompt is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.vllm.core import EngineLoop
from kvferry.scheduler.requests import RemotePromptState
from tests.engine_core.test_both_legs import (
    PROMPT,
    REMOTE_DECODE,
    check,
    ids,
    leg_params,
)
from tests.harness.core.loop import engine_core
from tests.harness.core.node import Node, ferry_of, until
from tests.harness.core.scheduler import tokens

FERRY = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "kvferry.connector",
    "kv_role": "kv_consumer",
}
CHILD = {
    "kv_connector": "HoldingChild",
    "kv_connector_module_path": "tests.engine_core.holding_child",
    "kv_role": "kv_both",
}


def beside(make: Any, *, policy: str = "recompute", **config: Any) -> tuple[Node, Any]:
    """A consumer with both children, and the scheduler's part of the one that holds."""
    children = [FERRY | {"kv_load_failure_policy": policy}, CHILD]
    consumer = make(
        "kv_consumer",
        connector="MultiConnector",
        module=None,
        policy=policy,
        extra={"connectors": children},
        **config,
    )
    return consumer, consumer.engine.connector.sub_connectors[1]


def loading(make: Any, **config: Any) -> tuple[Node, Node, Any, str]:
    """A load that waits for its producer to compute the rest of the prompt."""
    producer = make("kv_producer", max_step_tokens=16)
    consumer, child = beside(make, **config)
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.step()
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=4)
    side = ferry_of(consumer.engine.connector).scheduler_side
    asking = side.queries.queries
    until((consumer,), lambda: asking.snapshot().known)
    producer.step()
    until((consumer,), lambda: side.loads.state(decode) is RemotePromptState.LOADING)
    return producer, consumer, child, decode


@pytest.mark.parametrize("config", [{}, {"overlap": True}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("first", ["child", "load", "both"])
def test_an_aborted_loads_blocks_are_free_when_the_load_is_over_and_the_other_child_has_saved(
    make: Any, first: str, config: dict[str, Any]
) -> None:
    producer, consumer, child, decode = loading(make, **config)
    side = ferry_of(consumer.engine.connector).scheduler_side
    consumer.engine.abort(decode)
    if first == "child":
        child.saved.add(decode)
    for _ in range(4):
        if side.loads.state(decode) is RemotePromptState.ABORTED:
            assert consumer.engine.used_blocks, "the load has not ended"
        consumer.step()
    if first == "both":
        child.saved.add(decode)
    until((producer, consumer), lambda: side.loads.state(decode) is None)
    if first == "load":
        for _ in range(4):
            consumer.step()
        assert consumer.engine.used_blocks, "the other child has not saved them"
        child.saved.add(decode)
    until(
        (producer, consumer),
        lambda: consumer.engine.is_whole and producer.engine.is_whole,
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_that_crosses_the_loads_report_ends_no_engine(
    make: Any, overlap: bool
) -> None:
    producer = make("kv_producer", num_blocks=80)
    consumer, child = beside(make, overlap=overlap)
    for index in range(6):
        name = f"d{index}"
        prompt = tokens(40, seed=index + 1)
        consumer.engine.add(name, prompt, producer.prefill(f"p{index}", prompt))
        for _ in range(1 + index % 3):
            consumer.step()
        consumer.engine.abort(name)
        consumer.step()
        child.saved.add(name)
    until(
        (producer, consumer),
        lambda: consumer.engine.is_whole and producer.engine.is_whole,
    )


def test_a_request_that_fails_with_its_load_is_held_by_both_children(make: Any) -> None:
    producer, consumer, child, decode = loading(make, policy="fail")
    prefill, _ = ids("x")
    producer.engine.abort(prefill)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason == "error",
    )
    assert consumer.engine.used_blocks
    child.saved.add(decode)
    until(
        (producer, consumer),
        lambda: consumer.engine.is_whole and producer.engine.is_whole,
    )


@pytest.mark.parametrize("is_aborted", [False, True], ids=["reported", "aborted"])
@pytest.mark.parametrize("config", [{}, {"overlap": True}, {"tp": 2}], ids=str)
def test_a_request_that_fails_with_its_prefill_is_held_by_both_children(
    make: Any, config: dict[str, Any], is_aborted: bool
) -> None:
    """No load belongs to it, but vLLM believes so."""
    producer = make("kv_producer")
    consumer, child = beside(make, policy="fail", **config)
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=4)
    side = ferry_of(consumer.engine.connector).scheduler_side
    until((consumer,), lambda: side.queries.queries.snapshot().known)
    producer.engine.abort(prefill)
    until((producer, consumer), lambda: consumer.engine.used_blocks > 0)
    if is_aborted:
        consumer.engine.abort(decode)
    until((producer, consumer), lambda: decode in child.held)
    for _ in range(4):
        consumer.step()
    assert consumer.engine.used_blocks, "the other child has not saved them"
    child.saved.add(decode)
    until(
        (producer, consumer),
        lambda: consumer.engine.is_whole and producer.engine.is_whole,
    )
    assert not side.queries.unreported


def test_the_loop_does_not_wait_for_an_answer_while_the_other_child_saves(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That child needs steps, and blocks are held until it has reported."""
    producer = make("kv_producer")
    consumer, child = beside(make)
    waits: list[float] = []

    def wait(_: EngineLoop, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return False

    monkeypatch.setattr(EngineLoop, "wait", wait)
    with engine_core(consumer.engine.scheduler):
        consumer.decode("ended", tokens(40), None)
        prefill, decode = ids("x")
        producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
        consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=4)
        for _ in range(3):
            consumer.step()
        assert not waits
        child.saved.add("ended")
        until((consumer,), lambda: not consumer.engine.used_blocks)
        consumer.step()
        assert waits
    child.saved.add(decode)
    until(
        (producer, consumer),
        lambda: consumer.engine.is_whole and producer.engine.is_whole,
    )


def test_answers_are_right_beside_it(make: Any) -> None:
    producer, consumer, child, decode = loading(make)
    child.saved.add(decode)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    until(
        (producer, consumer),
        lambda: consumer.engine.is_whole and producer.engine.is_whole,
    )
