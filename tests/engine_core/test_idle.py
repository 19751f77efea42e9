"""An engine that only holds blocks is idle: no steps, and the blocks come back with the next request.

`must_step` is what vLLM's loop asks (`has_work`): while it is false, no step is taken here either.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.harness.core.node import Node
from tests.harness.core.runners import SecondRunner
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.harness.integrity import snapshot_of
from tests.promises import promise
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sleeps_long")]

PROMPT = tokens(100)
REMOTE_DECODE = {"do_remote_decode": True}
LONG = {"extra": {"kv_lease_duration": 600.0}}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapping, second runner": {"overlap": True, "runner": SecondRunner},
    "two ranks": {"tp": 2},
    "two stages": {"pp": 2},
    "sliding window": {"window": 48},
}


def work(node: Node, most: int = 50) -> int:
    """Step as the engine's loop does, until it would sleep. Returns the number of steps."""
    for count in range(most):
        if not node.go_on():
            return count
    raise AssertionError(f"it was not idle after {most} steps")


def prefill(node: Node, name: str, prompt: list[int]) -> dict[str, Any]:
    """The params of a prefill; the node is idle afterwards."""
    node.engine.add(name, prompt, REMOTE_DECODE, max_tokens=1)
    work(node)
    params = node.engine.answers[name].params
    assert params is not None
    return params


def reported(node: Node) -> bool:
    """Whether every worker's transfer thread has something for the next step."""
    return all(snapshot_of(worker).untaken.sent for worker in node.ferry_workers)


def wait_until_reported(node: Node) -> None:
    wait_until(lambda: reported(node), "every worker has a report")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_held_prompt_is_read_from_an_engine_that_takes_no_step_meanwhile(
    make: Any, shape: str
) -> None:
    """So the hold was announced before it is idle, and its blocks are kept without vLLM's help."""
    config = SHAPES[shape]
    same = {
        name: config[name] for name in ("window", "pp") if name in config
    }  # the same model
    producer, consumer = (
        make("kv_producer", **LONG, **config),
        make("kv_consumer", **same),
    )
    params = prefill(producer, "p", PROMPT)
    assert not producer.engine.scheduler.requests, "vLLM knows the request no more"
    before = producer.engine.used_blocks
    assert before > 0
    consumer.decode("d", PROMPT, params)
    assert consumer.engine.counted("loads") == 1
    assert consumer.engine.counted("failed_loads") == 0
    assert not producer.must_step, "no request needs the blocks"
    assert producer.engine.used_blocks == before
    wait_until_reported(producer)
    producer.engine.add("next", tokens(20, seed=7), max_tokens=1)
    work(producer)
    assert producer.engine.is_whole
    assert producer.engine.counted("leases_released", "done") == 1


@promise(3)
def test_a_prompt_that_finds_the_pool_full_of_leases_that_were_read_is_computed_in_the_second_step(
    make: Any,
) -> None:
    producer, consumer = make("kv_producer", num_blocks=15, **LONG), make("kv_consumer")
    prompts = {
        name: tokens(100, seed=ord(name)) for name in "ab"
    }  # seven blocks of fourteen each
    params = {name: prefill(producer, name, prompt) for name, prompt in prompts.items()}
    assert producer.engine.free_blocks == 0
    for name, prompt in prompts.items():
        consumer.decode(f"d-{name}", prompt, params[name])
    wait_until_reported(producer)
    wait_until(
        lambda: len(snapshot_of(producer.ferry_workers[0]).untaken.sent) == 2,
        "both are reported",
    )
    producer.engine.add("new", tokens(100, seed=3), max_tokens=1)
    assert producer.step().computed == {}
    assert producer.step().computed == {"new": 100}
    assert producer.engine.counted("leases_released", "evicted") == 0


def test_a_prompt_that_finds_every_slot_taken_by_a_lease_that_was_read_gets_one_in_the_second_step(
    make: Any,
) -> None:
    producer = make("kv_producer", extra={"kv_lease_duration": 600.0, "lease_slots": 1})
    consumer = make("kv_consumer")
    consumer.decode("d", PROMPT, prefill(producer, "p", PROMPT))
    wait_until_reported(producer)
    producer.engine.add("new", tokens(100, seed=3), REMOTE_DECODE, max_tokens=1)
    assert producer.step().computed == {}
    assert producer.step().computed == {"new": 100}
    work(producer)
    assert producer.engine.answers["new"].params is not None


def test_no_lease_is_evicted_before_the_engine_knows_which_are_over_anyway(
    make: Any,
) -> None:
    """Of two offers one was read while the engine slept. The other is idle, and would go at once."""
    producer, consumer = make("kv_producer", num_blocks=15, **LONG), make("kv_consumer")
    prompts = {name: tokens(100, seed=ord(name)) for name in "ab"}
    params = {name: prefill(producer, name, prompt) for name, prompt in prompts.items()}
    consumer.decode("d-b", prompts["b"], params["b"])
    wait_until_reported(producer)
    clock = producer.engine.connector.scheduler_side.leases.clock
    ahead_s, deserted_s = time.monotonic(), clock.awake_s + 300.0
    while clock.awake_s < deserted_s:  # `a` is deserted: ten heartbeats are over
        ahead_s += clock.heartbeat_s
        clock.wind(ahead_s)
    producer.engine.add("new", tokens(100, seed=3), max_tokens=1)
    work(producer)
    assert producer.engine.counted("leases_released", "evicted") == 0
    assert producer.engine.answers["new"].tokens == expected_tokens(
        tokens(100, seed=3), 1
    )
    consumer.decode("d-a", prompts["a"], params["a"])
    assert consumer.engine.counted("failed_loads") == 0


def test_a_call_to_an_engine_that_was_idle_for_long_gets_one_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call to pause it, or to empty its prefix cache: what was read meanwhile is free after that."""
    producer, consumer = make("kv_producer", **LONG), make("kv_consumer")
    params = prefill(producer, "p", PROMPT)
    consumer.decode("d", PROMPT, params)
    wait_until_reported(producer)
    monkeypatch.setattr("kvferry.connector.scheduler_side.steps.MAX_IDLE_S", 0.5)
    time.sleep(0.6)
    assert producer.must_step
    producer.step()
    assert producer.engine.is_whole
    assert producer.engine.scheduler.reset_prefix_cache()
