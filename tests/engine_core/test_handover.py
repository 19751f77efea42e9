"""Two whole engines in this process: real schedulers, real worker sides, real NIXL reads, and a toy model whose tokens
show what is in the cache."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from kvferry.protocol.errors import InvalidMessage
from kvferry.worker.device import Device
from tests.fakes.device_mark import FakeClock
from tests.harness.core import configs, node
from tests.harness.core import scheduler as driver
from tests.harness.core.node import Node
from tests.harness.core.runners import FirstRunner, SecondRunner
from tests.harness.core.scheduler import BLOCK_TOKENS, tokens

pytestmark = pytest.mark.slow


SHAPES: dict[str, dict[str, Any]] = {
    "first runner": {"runner": FirstRunner},
    "second runner": {"runner": SecondRunner},
    "second runner, overlapping steps": {"runner": SecondRunner, "overlap": True},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_prompts_of_any_length_are_decoded_from_the_other_cache(
    make: Any, config: dict[str, Any]
) -> None:
    producer, consumer = make("kv_producer", **config), make("kv_consumer", **config)
    blocks = 0
    for seed, length in enumerate(
        (1, 2, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 400), 10
    ):
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


@pytest.mark.parametrize(
    "config",
    [{}, {"tp": 2, "overlap": True}],
    ids=["one worker", "two workers, overlapping"],
)
def test_a_model_with_a_sliding_window_is_handed_over_in_both_of_its_groups(
    make: Any, config: dict[str, Any]
) -> None:
    shape = {"window": WINDOW, "num_blocks": 80, **config}
    producer, consumer = make("kv_producer", **shape), make("kv_consumer", **shape)
    for length in (1, 16, 17, 40, 47, 48, 50, 64, 100, 128, 130, 300):
        prompt = tokens(length, seed=length)
        consumer.decode(f"d{length}", prompt, producer.prefill(f"p{length}", prompt))
        longer = [*prompt, *tokens(30, seed=7)]
        consumer.decode(
            f"longer{length}", longer, producer.prefill(f"pl{length}", longer)
        )
        producer.until(lambda: producer.engine.is_whole)
        assert consumer.engine.is_whole
    assert consumer.engine.counted("loads") == 24


LENGTHS = (47, 63, 64, 70, 95, 100, 111, 128)
SHARED = (32, 64, 96)


@pytest.mark.parametrize(
    ("theirs", "ours", "chunk", "loaded"),
    [
        (16, 32, 512, 7),
        (16, 32, 16, 5),
        (32, 16, 512, 5),
        (16, 16, 512, 5),
        (16, 16, 16, 5),
    ],
)
def test_neither_the_prompt_nor_another_that_begins_alike_is_answered_from_what_was_given_back(
    make: Any,
    theirs: int,
    ours: int,
    chunk: int,
    loaded: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A producer holds what vLLM has not freed before the last chunk of the prompt."""

    def with_blocks_of(block_tokens: int, role: str) -> Node:
        with monkeypatch.context() as changed:
            for module in (configs, driver, node):
                changed.setattr(module, "BLOCK_TOKENS", block_tokens)
            made: Node = make(role, window=WINDOW, num_blocks=80, max_step_tokens=chunk)
            return made

    producer, consumer = (
        with_blocks_of(theirs, "kv_producer"),
        with_blocks_of(ours, "kv_consumer"),
    )
    for length in LENGTHS:
        prompt = tokens(length, seed=length)
        prompts = {f"d{length}": prompt}
        prompts |= {
            f"b{length}-{n}": [*prompt[:n], *tokens(20, seed=n + 7)]
            for n in SHARED
            if n <= length
        }
        params = producer.prefill(f"p{length}", prompt)
        for name, asked in prompts.items():
            consumer.decode(name, asked, params if asked is prompt else None)
        producer.until(lambda: producer.engine.is_whole)
    assert consumer.engine.counted("loads") == loaded
    assert (
        consumer.engine.counted("local_recomputes", "window_edge")
        == len(LENGTHS) - loaded
    )
    # What was not wanted was given back at once, not after its lease.
    assert (
        producer.engine.counted("leases_released", "release") == len(LENGTHS) - loaded
    )


def test_the_order_of_vllm_0_33_with_a_drafter_hands_over_as_well(make: Any) -> None:
    producer, consumer = (
        make("kv_producer", runner=SecondRunner),
        make("kv_consumer", runner=SecondRunner),
    )
    producer.method = consumer.method = "step_0_33"
    prompt = tokens(100)
    assert consumer.decode("d", prompt, producer.prefill("p", prompt)) == 1
    producer.until(lambda: producer.engine.is_whole)
    assert consumer.engine.is_whole


def test_what_makes_a_prompt_ready_is_marked_after_the_drafters_work(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, clock = make("kv_producer", runner=SecondRunner), FakeClock(over=True)
    when_drafted, at_the_end = list[int](), list[int]()
    (runner,) = producer.runners
    monkeypatch.setattr(Device, "mark", lambda _: clock.mark())

    def step(output: Any, forward: Any) -> Any:
        report = runner.step_0_33(
            output, forward, lambda _: when_drafted.append(len(clock.marks))
        )
        at_the_end.append(len(clock.marks))
        return report

    runner.step_with_drafter = step
    producer.method = "step_with_drafter"
    producer.prefill("p", tokens(100))
    assert at_the_end[0] > when_drafted[0], "the first step computes the whole prompt"


def test_a_worker_that_does_not_find_itself_among_its_engines_workers_stops_the_start() -> (
    None
):
    """The worker plans with the descriptions from the process groups."""
    nobody = mock.patch(
        "kvferry.connector.worker_side.side.gather_workers", return_value=()
    )
    with nobody, pytest.raises(InvalidMessage, match="0 workers"):
        Node("kv_producer")


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_decodes_from_the_other_cache(
    make: Any, theirs: int, ours: int
) -> None:
    producer, consumer = make("kv_producer", tp=theirs), make("kv_consumer", tp=ours)
    for number, length in enumerate((5, 16, 17, 70)):
        prompt, name = tokens(length, seed=number), f"request-{number}"
        consumer.decode(name, prompt, producer.prefill(name, prompt))
    assert consumer.engine.counted("failed_loads", "plan") == 0
    assert consumer.engine.counted("local_recomputes") == 0
    producer.until(lambda: producer.engine.is_whole)
