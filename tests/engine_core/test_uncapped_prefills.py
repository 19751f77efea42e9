"""A prefill that is not capped at one token: the decoder gets the prompt, and nothing of what the prefill generates."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_core.test_both_legs import COUNT, check, ids, leg_params
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens

PROMPT = tokens(100, seed=3)
GENERATED = 30
REMOTE_DECODE = {"do_remote_decode": True}
KINDS = pytest.mark.parametrize(
    "config",
    [
        {},
        {"overlap": True},
        {"max_step_tokens": 64},
        {"window": 48, "num_blocks": 60},
        {"tp": 2},
    ],
    ids=["plain", "overlapping steps", "in chunks", "windows", "two workers"],
)


def prefill(producer: Node, name: str) -> dict[str, Any]:
    producer.engine.add(name, PROMPT, REMOTE_DECODE, max_tokens=GENERATED)
    answer = producer.answer(name)
    assert answer.tokens == expected_tokens(PROMPT, GENERATED, producer.window)
    assert answer.params is not None
    for _ in range(2):
        producer.step()
    return answer.params


@KINDS
def test_its_whole_prompt_is_loaded_and_its_lease_ends(
    make: Any, config: dict[str, Any]
) -> None:
    producer, consumer = make("kv_producer", **config), make("kv_consumer", **config)
    params = prefill(producer, "p")
    assert params["remote_num_tokens"] == len(PROMPT)
    assert consumer.decode("d", PROMPT, params) == 1
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("leases_released", "done") == 1


@KINDS
def test_with_both_legs_at_once_its_prompt_is_loaded_while_it_generates(
    make: Any, config: dict[str, Any]
) -> None:
    producer, consumer = make("kv_producer", **config), make("kv_consumer", **config)
    name, decode = ids("x")
    producer.engine.add(name, PROMPT, REMOTE_DECODE, max_tokens=GENERATED)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)

    def turn() -> bool:
        """The prefill takes a step only while its decoder has not answered, as if it generated for long."""
        return consumer.engine.answers[decode].finish_reason is not None

    for _ in range(5):
        producer.step()
    until((consumer,), turn)
    check(consumer, decode, PROMPT)
    assert producer.engine.answers[name].finish_reason is None
    assert consumer.engine.counted("loads") == 1
    assert producer.answer(name).tokens == expected_tokens(
        PROMPT, GENERATED, producer.window
    )
    until(
        (producer, consumer),
        lambda: producer.engine.is_whole and consumer.engine.is_whole,
    )


def test_one_that_is_aborted_while_it_generates_gives_its_blocks_back(
    make: Any,
) -> None:
    producer = make("kv_producer")
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=GENERATED)
    for _ in range(5):
        producer.step()
    producer.engine.abort("p")
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("leases_released", "abandoned") == 1
