"""A step raises in a worker. vLLM throws its output away, but the worker lives on for a while, or for good."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine_core.believed import believed, check_believed, settle
from tests.engine_core.streamed import REMOTE_DECODE, ask
from tests.harness.core.node import Node
from tests.harness.core.runners import FirstRunner, SecondRunner
from tests.harness.core.scheduler import tokens
from tests.promises import promise

PROMPT = tokens(140, seed=3)
RUNNERS = pytest.mark.parametrize(
    "runner", [FirstRunner, SecondRunner], ids=["first runner", "second runner"]
)
OVERLAP = pytest.mark.parametrize(
    "overlap", [False, True], ids=["in turn", "overlapping"]
)


class Broken(Exception):
    """What the model raises."""


def step_that_raises(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose forward pass writes nothing."""

    def forward(output: Any) -> None:
        raise Broken

    with monkeypatch.context() as changed:
        changed.setattr(node.model, "forward", forward)
        with pytest.raises(Broken):
            node.step()
    while node.steps_in_flight:  # earlier steps, whose outputs come first
        node.answer_oldest()


def recover(node: Node) -> None:
    """As vLLM's fault tolerance does: every request is aborted, and the outputs of later steps are dropped."""
    node.engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    node.steps_in_flight.clear()


@promise(1)
@RUNNERS
@OVERLAP
@pytest.mark.parametrize("max_step_tokens", [64, 256], ids=["in parts", "in one step"])
def test_nothing_of_a_step_that_raised_is_read(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    runner: Any,
    overlap: bool,
    max_step_tokens: int,
) -> None:
    producer: Node = make(
        "kv_producer", runner=runner, overlap=overlap, max_step_tokens=max_step_tokens
    )
    producer.model.poison()
    prompts = {"p": PROMPT, "q": [*PROMPT[:128], *tokens(30, seed=9)]}
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    ask(producer, "p", PROMPT)
    if max_step_tokens == 64:
        producer.step()
        check_believed(producer, prompts)
    step_that_raises(producer, monkeypatch)
    check_believed(producer, prompts)
    assert not any(one.is_ready for one in believed(producer))
    if overlap:  # vLLM has scheduled one more before it hears of the error: it hits what was not written
        producer.engine.add("q", prompts["q"], REMOTE_DECODE, max_tokens=1)
        producer.step()
        settle(producer)
        assert believed(producer) == []
    recover(producer)
    producer.step()
    settle(producer)
    assert believed(producer) == []
    producer.until(lambda: producer.engine.is_whole)


@RUNNERS
@OVERLAP
def test_prompts_after_the_recovery_are_handed_over(
    make: Any, monkeypatch: pytest.MonkeyPatch, runner: Any, overlap: bool
) -> None:
    producer, consumer = (
        make("kv_producer", runner=runner, overlap=overlap),
        make("kv_consumer"),
    )
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    step_that_raises(producer, monkeypatch)
    recover(producer)
    producer.step()  # where steps overlap, one that was scheduled before the error was known counts as raised, too
    producer.until(lambda: producer.engine.is_whole)
    prompt = tokens(100, seed=8)
    consumer.decode("d", prompt, producer.prefill("q", prompt), producer)
    assert consumer.engine.counted("peer_loads") == 1


@RUNNERS
def test_what_was_readable_before_stays_so(
    make: Any, monkeypatch: pytest.MonkeyPatch, runner: Any
) -> None:
    producer, consumer = make("kv_producer", runner=runner), make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    settle(producer)
    producer.engine.add("q", tokens(100, seed=8), REMOTE_DECODE, max_tokens=1)
    step_that_raises(producer, monkeypatch)
    recover(producer)
    consumer.decode("d", PROMPT, params, producer)
    assert consumer.engine.counted("peer_loads") == 1


@RUNNERS
def test_an_error_that_the_caller_handles_meanwhile_is_not_the_steps(
    make: Any, runner: Any
) -> None:
    producer, consumer = make("kv_producer", runner=runner), make("kv_consumer")
    try:
        raise Broken
    except Broken:
        params = producer.prefill("p", PROMPT)
        consumer.decode("d", PROMPT, params, producer)
    assert consumer.engine.counted("peer_loads") == 1
