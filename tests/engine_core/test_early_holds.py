"""A prompt's blocks are held from the step on that completes it, and readable as soon as that step has run."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.slots import (
    SlotState,
)
from tests.harness.core.node import Node, ferry_of
from tests.harness.core.scheduler import tokens
from tests.harness.exported import slots_of
from tests.harness.integrity import check_worker
from tests.waiting import wait_until

PROMPT = tokens(140, seed=3)
REMOTE_DECODE = {"do_remote_decode": True}
CHUNKED: dict[str, Any] = {"overlap": True, "max_step_tokens": 100, "num_blocks": 40}


def begun(make: Any, **config: Any) -> Node:
    """A producer whose second step, which completes the prompt, has run and is not answered."""
    producer: Node = make("kv_producer", **{**CHUNKED, **config})
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.step()
    assert slot_states(producer) == [SlotState.COMPUTING]
    producer.step()
    assert producer.engine.answers["p"].params is None
    return producer


def slot_states(node: Node) -> list[SlotState]:
    """The state in every word of the first worker that is not empty."""
    words = slots_of(node.ferry_workers[0]).words
    return [SlotState(int(word) & 15) for word in words if word]


def until_ready(node: Node) -> None:
    wait_until(lambda: slot_states(node) == [SlotState.READY], "its slot is READY")


def test_blocks_are_readable_before_the_step_that_completes_them_is_answered(
    make: Any,
) -> None:
    producer, consumer = begun(make), make("kv_consumer")
    until_ready(producer)
    params = producer.answer("p").params
    consumer.decode("d", PROMPT, params)
    producer.until(lambda: producer.engine.is_whole)


def test_blocks_are_not_readable_before_the_end_of_the_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(
            "kvferry.connector.worker_side.side.WorkerSide.end_step", lambda side: None
        )
        producer = begun(make)
        check_worker(
            producer.ferry_workers[0]
        )  # the transfer thread has taken the orders
        assert slot_states(producer) == [SlotState.COMPUTING]
    ferry_of(producer.workers[0]).worker_side.end_step()
    until_ready(producer)


def test_a_step_whose_end_the_model_runner_does_not_report_has_ended_when_the_next_begins(
    make: Any,
) -> None:
    """vLLM's first runner reports none with drafts, on pipeline stages before the last one."""
    producer = make("kv_producer", **CHUNKED)
    producer.workers[0].wait_for_save = lambda: None
    producer.engine.add("p", PROMPT, REMOTE_DECODE, max_tokens=1)
    producer.step()
    producer.step()
    producer.engine.add("q", PROMPT, REMOTE_DECODE, max_tokens=1)
    assert slot_states(producer) == [SlotState.COMPUTING]
    producer.step()
    wait_until(lambda: SlotState.READY in slot_states(producer), "a slot is READY")


def test_a_request_that_is_preempted_after_its_last_step_gives_none_of_its_blocks_away(
    make: Any,
) -> None:
    producer, consumer = begun(make), make("kv_consumer")
    (lease,) = (
        producer.engine.connector.scheduler_side.leases.block_references.held.values()
    )
    producer.engine.preempt("p")
    producer.engine.add("other", tokens(400, seed=4), max_tokens=2)
    producer.until(lambda: bool(producer.engine.answers["other"].tokens))
    assert not {*producer.engine.block_ids("other")} & {*lease.block_ids}
    params = producer.answer("p").params
    assert params is not None
    assert params["remote_block_ids"] == [list(lease.block_ids)]
    consumer.decode("d", PROMPT, params)
    producer.until(lambda: producer.engine.is_whole)


def test_the_lease_of_a_request_that_is_preempted_after_its_last_step_ends_in_time_although_it_is_not_computed_again(
    make: Any,
) -> None:
    """A paused engine admits no preempted request, and waits until no lease is held."""
    producer = begun(make, extra={"kv_lease_duration": 0.3}, num_blocks=200)
    scheduler = producer.engine.scheduler
    producer.engine.preempt("p")
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    producer.until(lambda: not producer.engine.used_blocks)
    producer.step()
    assert producer.engine.counted("leases_released", "expired") == 1
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert producer.answer("p").params is None
    producer.until(lambda: producer.engine.is_whole)


def test_a_request_that_is_aborted_after_its_last_step_frees_its_blocks_when_the_workers_have_ended_its_lease(
    make: Any,
) -> None:
    producer = begun(make)
    until_ready(producer)
    producer.engine.abort("p")
    assert producer.engine.used_blocks == 9
    assert slot_states(producer) == [SlotState.READY]
    producer.until(lambda: producer.engine.is_whole)
    assert slot_states(producer) == []
    assert producer.engine.counted("leases_released", "abandoned") == 1


def test_a_lease_does_not_expire_while_its_request_runs(make: Any) -> None:
    lease_s = 0.3
    producer = begun(make, extra={"kv_lease_duration": lease_s})
    leases = producer.engine.connector.scheduler_side.leases
    began_s = leases.clock.awake_s
    wait_until(
        lambda: leases.clock.awake_s >= began_s + 2 * lease_s,
        "the listener's thread has wound the clock",
    )
    assert producer.answer("p").params is not None
    assert producer.engine.counted("leases_released", "expired") == 0
    producer.until(lambda: producer.engine.is_whole)
    assert producer.engine.counted("leases_released", "expired") == 1


def test_the_digests_of_a_long_prompt_are_not_made_in_its_last_step(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 64,000 tokens take 0.6 ms of the thread that launches the step."""
    producer, prompt = (
        make("kv_producer", max_step_tokens=256, max_tokens=2048, num_blocks=80),
        tokens(1024, seed=5),
    )
    producer.engine.add("p", prompt, REMOTE_DECODE, max_tokens=1)
    for _ in range(3):
        producer.step()
    with monkeypatch.context() as changed:
        changed.setattr(
            "kvferry.protocol.digests._CHUNK", None
        )  # no chunk can be digested
        producer.step()
    assert producer.engine.answers["p"].params["kvferry"]["digests"] == list(
        digest_chain(Prompt(tokens=prompt))
    )
