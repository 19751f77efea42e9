"""Sessions of streamed input: params on a later part of the input are counted, and what they name is given back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_core.test_both_legs import leg_params
from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens

PROMPT, FIRST, MORE = tokens(100, seed=3), tokens(40, seed=4), tokens(30, seed=5)
LONG = {"kv_lease_duration": 600.0}
"""Long enough that freed blocks were freed by a release."""


def nested(depth: int) -> dict[str, Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return {"other": inner}


def begin(consumer: Node, params: Any = None) -> None:
    """A session whose first part has been answered."""
    consumer.engine.add("s", FIRST, params, max_tokens=2, resumable=True)
    consumer.until(lambda: consumer.engine.status("s") == "WAITING_FOR_STREAMING_REQ")


def add_part(consumer: Node, params: Any) -> None:
    consumer.engine.add("s", MORE, params, max_tokens=2, resumable=True)


def end(consumer: Node) -> None:
    consumer.engine.abort("s")
    consumer.until(lambda: consumer.engine.is_whole)
    consumer.step()


def updates(node: Node) -> int:
    return node.engine.counted("local_recomputes", "session_update")


@pytest.mark.parametrize(
    "when", ["it waits", "it runs", "it never gets to it", "it ends before a step"]
)
def test_the_lease_that_a_later_part_names_is_given_back(make: Any, when: str) -> None:
    producer, consumer = make("kv_producer", extra=LONG), make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    if when in ("it waits", "it ends before a step"):
        begin(consumer)
    else:
        consumer.engine.add(
            "s",
            FIRST,
            max_tokens=50 if when == "it never gets to it" else 2,
            resumable=True,
        )
        consumer.step()
    add_part(consumer, params)
    if when in ("it waits", "it runs"):
        consumer.until(lambda: updates(consumer) == 1)
    end(consumer)
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("leases_released", "release") == 1
    assert updates(consumer) == 1
    assert consumer.engine.counted("loads") == 0


def test_a_first_part_is_loaded_and_its_params_are_no_update_when_vllm_repeats_them(
    make: Any,
) -> None:
    producer, consumer = make("kv_producer", extra=LONG), make("kv_consumer")
    params = producer.prefill("p", FIRST)
    begin(consumer, params)
    assert consumer.engine.counted("loads") == 1
    for _ in range(2):
        add_part(consumer, dict(params))
        consumer.until(
            lambda: consumer.engine.status("s") == "WAITING_FOR_STREAMING_REQ"
        )
    end(consumer)
    assert updates(consumer) == 0
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("leases_released", "done") == 1


@pytest.mark.parametrize(
    ("params", "counted"),
    [
        (None, {}),
        ({"other": 1}, {}),
        ({"do_remote_decode": True}, {"prefills_kept": 1}),
        ({"do_remote_prefill": True}, {"local_recomputes": 1}),
        ({"do_remote_prefill": 7}, {"local_recomputes": 1}),
        ("text", {"local_recomputes": 1}),
        (nested(5000), {}),
    ],
    ids=["none", "of another", "a decode", "a wish", "a number", "text", "nested"],
)
def test_other_params_of_a_later_part_are_counted_and_stop_nothing(
    make: Any, params: Any, counted: dict[str, int]
) -> None:
    engine = make("kv_both")
    begin(engine, nested(5000) if isinstance(params, dict) else None)
    add_part(engine, params)
    engine.until(lambda: engine.engine.status("s") == "WAITING_FOR_STREAMING_REQ")
    end(engine)
    engine.step()
    for name in ("prefills_kept", "local_recomputes"):
        assert engine.engine.counted(name) == counted.get(name, 0)


def test_a_later_part_that_names_its_producer_is_counted(make: Any) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    begin(consumer)
    add_part(consumer, leg_params(producer, "x"))
    consumer.until(lambda: updates(consumer) == 1)
    end(consumer)


def test_a_later_part_whose_blocks_are_here_ends_their_lease(make: Any) -> None:
    node = make("kv_both", extra=LONG)
    params = node.prefill("p", PROMPT)
    begin(node)
    add_part(node, params)
    node.until(lambda: updates(node) == 1)
    end(node)
    assert node.engine.counted("leases_released", "release") == 1


def test_a_host_that_is_not_allowed_is_sent_nothing(make: Any) -> None:
    producer = make("kv_producer", extra=LONG)
    consumer = make("kv_consumer", extra={"allowed_hosts": ["10.9.9.9"]})
    begin(consumer)
    add_part(consumer, producer.prefill("p", PROMPT))
    consumer.until(lambda: updates(consumer) == 1)
    end(consumer)
    assert consumer.engine.counted("leases_given_back") == 0
