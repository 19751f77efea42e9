"""A prompt is loaded while it is computed: vLLM's schedulers, workers, and bytes on both sides."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.protocol.handshake import Release
from kvferry.protocol.queries import PromptProgress
from tests.engine_core.test_both_legs import check, ids, leg_params, settled
from tests.harness.core.node import Node, until
from tests.harness.core.scheduler import tokens
from tests.harness.integrity import snapshot_of

COUNT = 4
PROMPT = tokens(300, seed=3)
REMOTE_DECODE = {"do_remote_decode": True}
PREFILL, DECODE = ids("x")


def reading(make: Any, **config: Any) -> tuple[Node, Node]:
    """A producer in the middle of a prompt, and a consumer that has read what is computed of it."""
    config = {"max_step_tokens": 64, **config}
    producer, consumer = make("kv_producer", **config), make("kv_consumer", **config)
    producer.engine.add(PREFILL, PROMPT, REMOTE_DECODE, max_tokens=1)
    consumer.engine.add(DECODE, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    directory = producer.engine.connector.scheduler_side.tickets.directory
    until((consumer,), lambda: directory.waiting(PREFILL) is not None)
    producer.step()
    assert directory.snapshot().prompts[PREFILL] is PromptProgress.TICKET
    producer.step()
    until((consumer,), lambda: has_read_a_part(consumer))
    return producer, consumer


def has_read_a_part(consumer: Node) -> bool:
    """Whether a worker has read a part of a prompt that is still computed."""
    begun = [
        record
        for worker in consumer.ferry_workers
        for record in snapshot_of(worker).begun
    ]
    return any(record.chunks for record in begun)


def is_over(producer: Node, consumer: Node) -> bool:
    return (
        producer.engine.is_whole
        and consumer.engine.is_whole
        and settled(consumer)
        and len(producer.engine.connector.scheduler_side.leases.streams.free_rows) == 64
    )


@pytest.mark.parametrize(
    "config", [{}, {"overlap": True}, {"tp": 2}, {"window": 48}, {"window": 8}], ids=str
)
def test_the_first_parts_are_read_before_the_last_is_computed(
    make: Any, config: dict[str, Any]
) -> None:
    producer, consumer = reading(make, **config)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[DECODE].finish_reason is not None,
    )
    check(consumer, DECODE, PROMPT)
    assert consumer.engine.counted("early_bytes") > 0
    assert consumer.engine.counted("local_recomputes") == 0
    until((producer, consumer), lambda: is_over(producer, consumer))


@pytest.mark.parametrize("config", [{}, {"window": 48}], ids=str)
def test_a_prompt_that_is_preempted_meanwhile_is_read_from_its_beginning_again(
    make: Any, config: dict[str, Any]
) -> None:
    producer, consumer = reading(make, **config)
    producer.engine.preempt(PREFILL, drops_output=True)
    producer.engine.scheduler.kv_cache_manager.reset_prefix_cache()
    other = tokens(60, seed=9)
    producer.engine.add("other", other, max_tokens=2)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[DECODE].finish_reason is not None,
    )
    check(consumer, DECODE, PROMPT)
    assert consumer.engine.counted("local_recomputes") == 0
    assert producer.engine.counted("stream_restarts") == 1
    until((producer, consumer), lambda: is_over(producer, consumer))


@pytest.mark.parametrize(
    ("policy", "reason"), [("recompute", "length"), ("fail", "error")]
)
def test_a_prompt_that_is_aborted_meanwhile_ends_the_load_by_the_policy(
    make: Any, policy: str, reason: str
) -> None:
    producer, consumer = reading(make, policy=policy)
    producer.engine.abort(PREFILL)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[DECODE].finish_reason is not None,
    )
    assert consumer.engine.answers[DECODE].finish_reason == reason
    if reason == "length":
        check(consumer, DECODE, PROMPT)
    until((producer, consumer), lambda: is_over(producer, consumer))
    assert producer.engine.counted("leases_released", "abandoned") == 1


def test_a_consumer_that_leaves_meanwhile_leaks_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = reading(make)
    inbox = producer.engine.connector.scheduler_side.channel.listener.inbox
    arrived: list[type] = []
    put = inbox.put

    def noted(message: Any, *received_s: float) -> bool:
        has_room: bool = put(message, *received_s)
        arrived.append(type(message))
        return has_room

    monkeypatch.setattr(inbox, "put", noted)
    consumer.engine.abort(DECODE)
    # Else the producer may have computed the whole prompt before it hears of this.
    until((consumer,), lambda: Release in arrived)
    until((producer, consumer), lambda: is_over(producer, consumer))
    assert producer.engine.counted("leases_released", "release") == 1
    assert producer.engine.answers[PREFILL].params is None, (
        "there is nothing left to load"
    )


@pytest.mark.parametrize(
    "config",
    [{}, {"overlap": True}, {"tp": 2}, {"policy": "fail"}, {"window": 48}],
    ids=str,
)
def test_an_abort_frees_the_blocks_of_a_load_although_its_producer_goes_on_computing(
    make: Any, config: dict[str, Any]
) -> None:
    """The producer takes no step any more: its slot stays COMPUTING."""
    producer, consumer = reading(make, **config)
    assert consumer.engine.used_blocks
    consumer.engine.abort(DECODE)
    until((consumer,), lambda: consumer.engine.is_whole and settled(consumer))
    assert consumer.engine.counted("aborted_loads") == max(1, config.get("tp", 1))
    assert not any(
        map(
            consumer.engine.counted,
            ("local_recomputes", "failed_loads", "failed_requests"),
        )
    )
    producer.engine.abort(PREFILL)
    until((producer, consumer), lambda: is_over(producer, consumer))


def test_a_consumer_with_streaming_switched_off_reads_the_complete_prompt(
    make: Any,
) -> None:
    producer = make("kv_producer", max_step_tokens=64)
    consumer = make("kv_consumer", max_step_tokens=64, extra={"streaming": "off"})
    consumer.engine.add(DECODE, PROMPT, leg_params(producer, "x"), max_tokens=COUNT)
    producer.engine.add(PREFILL, PROMPT, REMOTE_DECODE, max_tokens=1)
    until(
        (producer, consumer),
        lambda: consumer.engine.answers[DECODE].finish_reason is not None,
    )
    check(consumer, DECODE, PROMPT)
    assert producer.engine.counted("streams") == 0
    assert consumer.engine.counted("early_bytes") == 0
