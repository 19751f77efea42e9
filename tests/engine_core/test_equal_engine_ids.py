"""Two engines that were given one `engine_id`, as a copied configuration has it: their boots tell them apart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_core.test_both_legs import (
    COUNT,
    PROMPT,
    REMOTE_DECODE,
    check,
    ids,
    leg_params,
)
from tests.harness.core.node import Node, until

SAME = pytest.mark.parametrize("engine_id", ["vllm", "vllm_dp0", "?", "kvferry1.x"])


@SAME
@pytest.mark.parametrize(
    "roles", [("kv_producer", "kv_consumer"), ("kv_both", "kv_both")]
)
def test_a_prompt_is_handed_over_in_turn(
    make: Any, engine_id: str, roles: tuple[str, str]
) -> None:
    producer, consumer = (make(role, engine_id=engine_id) for role in roles)
    assert consumer.decode("d", PROMPT, producer.prefill("p", PROMPT)) == 1
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("leases_released", "done") == 1


@SAME
def test_a_prompt_is_handed_over_with_both_legs_at_once(
    make: Any, engine_id: str
) -> None:
    producer, consumer = (
        make("kv_producer", engine_id=engine_id),
        make("kv_consumer", engine_id=engine_id),
    )
    prefill, decode = ids("x")
    producer.engine.add(prefill, PROMPT, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(decode, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[decode].finish_reason is not None,
    )
    check(consumer, decode)
    assert consumer.engine.counted("loads") == 1
    until(
        (producer, consumer),
        lambda: producer.engine.is_whole and consumer.engine.is_whole,
    )


def test_a_conversation_goes_on_in_both_directions(begin: Any) -> None:
    prefiller, decoder, talk = begin(engine_id="vllm")
    talk.say([5, 6, 7] * 20)
    assert prefiller.engine.counted("turn_loads") == 1
    assert decoder.engine.counted("loads") == 2
    assert not decoder.engine.counted("local_recomputes")


def test_two_producers_and_two_consumers_hand_over_in_turn(make: Any) -> None:
    producers: list[Node] = [make("kv_producer", engine_id="p") for _ in range(2)]
    consumers: list[Node] = [make("kv_consumer", engine_id="d") for _ in range(2)]
    for turn in range(3):
        for number, (producer, consumer) in enumerate(
            (producer, consumer) for producer in producers for consumer in consumers
        ):
            prompt = [turn * 16 + number + 1, *PROMPT]
            name = f"{turn}-{number}"
            assert (
                consumer.decode(
                    f"d{name}", prompt, producer.prefill(f"p{name}", prompt), producer
                )
                == 1
            )
    for producer in producers:
        assert producer.engine.counted("handshakes_served") == 2


@pytest.mark.parametrize("legs", ["in turn", "at once"])
def test_an_earlier_life_of_this_engine_is_not_another_engine(
    make: Any, legs: str
) -> None:
    """Nothing is asked of it, although its boot is not this one's."""
    node = make("kv_both")
    params = node.prefill("p", PROMPT) if legs == "in turn" else leg_params(node, "x")
    old = "f" * 32
    params["remote_engine_id"] = (
        f"kvferry1.{old}.{node.engine.connector.scheduler_side.channel.local.engine_id}"
    )
    if legs == "in turn":
        params["kvferry"]["boot"] = old
    node.decode("d", PROMPT, params)
    assert node.engine.counted("local_recomputes", "local_engine") == 1
    assert not node.engine.counted("loads")
