"""Two whole engines in this process: real schedulers, real worker sides, real NIXL reads, and a toy model whose tokens
show what is in the cache."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from kvferry.protocol.errors import InvalidMessage
from tests.harness.core.node import Node
from tests.harness.core.runners import FirstRunner, SecondRunner
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens
from tests.harness.core.toy_model import expected_tokens

pytestmark = pytest.mark.slow

COUNT = 5
"""Tokens that the consumer decodes."""


SHAPES: dict[str, dict[str, Any]] = {
    "first runner": {"runner": FirstRunner},
    "second runner": {"runner": SecondRunner},
    "second runner, overlapping steps": {"runner": SecondRunner, "overlap": True},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_prompts_of_any_length_are_decoded_from_the_other_cache(make: Any, config: dict[str, Any]) -> None:
    producer, consumer = make("kv_producer", **config), make("kv_consumer", **config)
    blocks = 0
    for seed, length in enumerate((1, 2, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 400), 10):
        prompt = tokens(length, seed=seed)
        params = producer.prefill(f"p{length}", prompt)
        assert consumer.decode(f"d{length}", prompt, params) == 1
        producer.until(lambda: producer.engine.is_whole)
        assert consumer.engine.is_whole
        blocks += -(-length // BLOCK_TOKENS)
        bytes_moved = blocks * producer.engine.block_bytes * len(consumer.workers)
        assert consumer.engine.counted("planned_bytes") == bytes_moved
    assert producer.engine.counted("leases_released", "done") == 13


WINDOW = 48


@pytest.mark.parametrize("config", [{}, {"tp": 2, "overlap": True}], ids=["one worker", "two workers, overlapping"])
def test_a_model_with_a_sliding_window_is_handed_over_in_both_of_its_groups(make: Any, config: dict[str, Any]) -> None:
    shape = {"window": WINDOW, "num_blocks": 80, **config}
    producer, consumer = make("kv_producer", **shape), make("kv_consumer", **shape)
    for length in (1, 16, 17, 40, 47, 48, 50, 64, 100, 128, 130, 300):
        prompt = tokens(length, seed=length)
        consumer.decode(f"d{length}", prompt, producer.prefill(f"p{length}", prompt))
        longer = [*prompt, *tokens(30, seed=7)]
        consumer.decode(f"longer{length}", longer, producer.prefill(f"pl{length}", longer))
        producer.until(lambda: producer.engine.is_whole)
        assert consumer.engine.is_whole
    assert consumer.engine.counted("loads") == 24


def test_the_order_of_vllm_0_33_with_a_drafter_hands_over_as_well(make: Any) -> None:
    producer, consumer = make("kv_producer", runner=SecondRunner), make("kv_consumer", runner=SecondRunner)
    for node in (producer, consumer):
        node.method = "step_0_33"
    prompt = tokens(100)
    assert consumer.decode("d", prompt, producer.prefill("p", prompt)) == 1
    producer.until(lambda: producer.engine.is_whole)
    assert consumer.engine.is_whole


def test_only_a_transfer_explains_the_tokens(make: Any) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prompt = tokens(100)
    params = producer.prefill("p", prompt)
    producer.model.poison()
    consumer.engine.add("d", prompt, params, max_tokens=COUNT)
    assert consumer.answer("d").tokens != expected_tokens(prompt, COUNT)


def test_a_producer_that_comes_back_under_its_name_is_used_again(make: Any) -> None:
    old, consumer = make("kv_producer"), make("kv_consumer")
    prompt = tokens(40)
    assert consumer.decode("d1", prompt, old.prefill("p1", prompt)) == 1
    port, engine_id = old.port, old.engine.config.kv_transfer_config.engine_id
    old.close()
    new = make("kv_producer", port=port, engine_id=engine_id)
    prompt = tokens(60, seed=3)
    assert consumer.decode("d2", prompt, new.prefill("p2", prompt)) == 1
    new.until(lambda: new.engine.is_whole)
    assert consumer.engine.is_whole


def test_a_producer_that_was_shut_down_is_never_read_again(make: Any) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prompt, other = tokens(40), tokens(50, seed=2)
    assert consumer.decode("d1", prompt, producer.prefill("p1", prompt)) == 1
    params = producer.prefill("p2", other)
    producer.close()
    producer.model.poison()
    assert consumer.decode("d2", other, params) == 50


def test_a_lease_that_expired_is_never_decoded_from(make: Any) -> None:
    producer, consumer = make("kv_producer", extra={"kv_lease_duration": 0.1}), make("kv_consumer")
    prompt = tokens(40)
    params = producer.prefill("p", prompt)
    producer.until(lambda: producer.engine.is_whole)
    producer.model.poison()
    assert consumer.decode("d", prompt, params) == 40
    assert consumer.engine.counted("failed_loads", "fence") == 1
    assert consumer.engine.is_whole


def test_params_that_were_used_before_are_computed_here_without_asking_their_producer(make: Any) -> None:
    producer, consumer = make("kv_producer"), make("kv_consumer")
    prompt = tokens(40)
    params = producer.prefill("p", prompt)
    assert consumer.decode("d1", prompt, params) == 1
    producer.until(lambda: producer.engine.is_whole)
    producer.model.poison()
    consumer.engine.scheduler.reset_prefix_cache()
    assert consumer.decode("d2", prompt, params) == 40
    producer.close()
    consumer.engine.scheduler.reset_prefix_cache()
    assert consumer.decode("d3", prompt, params) == 40
    assert consumer.engine.counted("local_recomputes", "lease_over") == 2
    assert (consumer.engine.counted("loads"), consumer.engine.counted("failed_loads")) == (1, 0)


def test_a_worker_that_does_not_find_itself_among_its_engines_workers_stops_the_start() -> None:
    """The worker plans with the descriptions from the process groups."""
    nobody = mock.patch("kvferry.connector.worker_side.side.gather_workers", return_value=())
    with nobody, pytest.raises(InvalidMessage, match="0 workers"):
        Node("kv_producer")


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_decodes_from_the_other_cache(make: Any, theirs: int, ours: int) -> None:
    producer, consumer = make("kv_producer", tp=theirs), make("kv_consumer", tp=ours)
    for number, length in enumerate((5, 16, 17, 70)):
        prompt, name = tokens(length, seed=number), f"request-{number}"
        consumer.decode(name, prompt, producer.prefill(name, prompt))
    assert consumer.engine.counted("failed_loads", "plan") == 0
    assert consumer.engine.counted("local_recomputes") == 0
    producer.until(lambda: producer.engine.is_whole)
