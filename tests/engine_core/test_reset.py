"""`/reset_prefix_cache` and weight updates: blocks computed before are never read after.

New weights are modelled by a poisoned cache: a request that reads an old cell answers wrong.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.core.node import Node
from tests.harness.core.scheduler import tokens
from tests.harness.core.toy_model import expected_tokens
from tests.promises import promise

PROMPT = tokens(100)
REMOTE_DECODE = {"do_remote_decode": True}


def reset(node: Node, *, running: bool = False) -> bool:
    """Do what `/reset_prefix_cache?reset_external=true` does, with `reset_running_requests` or without."""
    return bool(node.engine.scheduler.reset_prefix_cache(running, True))


def reset_until_done(node: Node) -> None:
    """Reset as an operator does: again until it succeeds."""
    node.until(lambda: reset(node))


@promise(2)
def test_a_held_lease_ends_with_a_reset_and_what_it_held_is_not_read(make: Any) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    assert not reset(producer), "vLLM cannot reset while blocks are held"
    reset_until_done(producer)
    producer.model.poison()
    consumer.decode("d", PROMPT, params, producer)
    assert consumer.engine.counted("failed_loads", "fence") == 1
    producer.step()
    assert producer.engine.counted("leases_released", "reset") == 1


@promise(1)
def test_a_prompt_that_is_half_computed_when_the_weights_change_is_answered_and_never_offered(
    make: Any,
) -> None:
    producer = make("kv_producer")
    long = tokens(300)
    producer.engine.add("p", long, REMOTE_DECODE, max_tokens=1)
    producer.step()
    assert not reset(producer)
    producer.until(lambda: producer.engine.answers["p"].finish_reason is not None)
    assert producer.engine.answers["p"].params is None
    producer.until(lambda: producer.engine.is_whole)
    producer.step()
    assert producer.engine.counted("leases_released", "reset") == 1


@pytest.mark.parametrize(
    "config", [{}, {"overlap": True}], ids=["one step", "overlapping steps"]
)
def test_a_prompt_that_is_computed_anew_after_a_reset_is_offered_under_another_epoch(
    make: Any, config: dict[str, Any]
) -> None:
    producer, consumer = make("kv_producer", **config), make("kv_consumer")
    long = tokens(300)
    producer.engine.add("p", long, REMOTE_DECODE, max_tokens=1)
    producer.step()
    side = producer.engine.connector.scheduler_side
    lease = side.leases.get("p")
    assert lease is not None
    first = int(lease.name.epoch, 16)
    assert reset(producer, running=True)
    producer.model.poison()
    params = producer.answer("p").params
    assert params is not None
    assert int(params["kvferry"]["lease_epoch"], 16) != first
    for _ in range(3):
        producer.step()
    consumer.decode("d", long, params, producer)
    assert consumer.engine.counted("loads") == 1
    assert consumer.engine.counted("failed_loads") == 0
    producer.until(lambda: producer.engine.is_whole)


@promise(8)
def test_a_consumer_that_is_reset_computes_what_it_has_not_begun_to_load_and_gives_it_back(
    make: Any,
) -> None:
    """Its weights have changed: the producer's blocks are of the old ones."""
    producer, consumer = make("kv_producer"), make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    producer.model.poison()
    consumer.engine.add("d", PROMPT, params, max_tokens=4)
    assert reset(consumer)
    assert consumer.answer("d").tokens == expected_tokens(PROMPT, 4)
    assert consumer.engine.counted("local_recomputes", "reset") == 1
    assert consumer.engine.counted("loads") == 0
    producer.until(lambda: producer.engine.is_whole)
    producer.step()
    assert producer.engine.counted("leases_released", "release") == 1


def test_a_reset_does_not_succeed_while_blocks_are_loaded_and_what_was_loaded_before_goes_with_it(
    make: Any,
) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    params = producer.prefill("p", PROMPT)
    producer.model.poison()
    consumer.engine.add("d", PROMPT, params, max_tokens=4)
    consumer.step()
    assert consumer.engine.status("d") == "WAITING_FOR_REMOTE_KVS"
    assert not reset(consumer)
    with pytest.raises(RuntimeError, match="not supported"):
        reset(consumer, running=True)
    consumer.until(lambda: consumer.engine.status("d") != "WAITING_FOR_REMOTE_KVS")
    assert reset(consumer, running=True)
    answer = consumer.answer("d").tokens
    assert answer[-3:] == expected_tokens([*PROMPT, answer[0]], 3), (
        "all that comes after the reset is right"
    )
    producer.until(lambda: producer.engine.is_whole)


def test_offers_of_turns_end_with_a_reset_and_an_answer_that_was_begun_before_is_not_offered(
    make_both: Any,
) -> None:
    prefiller, decoder = make_both(num_blocks=32), make_both(num_blocks=32)
    decoder.decode("d1", PROMPT, prefiller.prefill("p1", PROMPT), prefiller)
    offer = decoder.engine.answers["d1"].params
    assert offer is not None
    other = tokens(60, seed=3)
    decoder.engine.add("d2", other, prefiller.prefill("p2", other), max_tokens=30)
    decoder.until(lambda: len(decoder.engine.answers["d2"].tokens) > 2)
    reset(decoder)
    assert decoder.answer("d2").params is None
    reset_until_done(decoder)
    decoder.model.poison()
    text = [*PROMPT, *decoder.engine.answers["d1"].tokens, *tokens(20, seed=4)]
    prefiller.until(lambda: prefiller.engine.is_whole)
    prefiller.engine.scheduler.reset_prefix_cache()
    prefiller.engine.add("p3", text, offer, max_tokens=1)
    while prefiller.engine.answers["p3"].finish_reason is None:
        decoder.step()
        prefiller.step()
    assert prefiller.engine.answers["p3"].tokens == expected_tokens(text, 1)
    assert prefiller.engine.counted("local_recomputes", "load_failed") == 1
    assert decoder.engine.counted("turns_released", "reset") == 2
