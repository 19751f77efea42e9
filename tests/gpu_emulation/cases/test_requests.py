"""What happens to requests beside a plain handover, under vLLM's GPU runner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.gpu_emulation.engines import NOISE, Settings, Trio, prompt_of
from tests.vllm.forked_engine import difference, hand_over_at_once
from tests.waiting import wait_until

Differs = Callable[[float], float]
MODEL = "small-llama-4"


def test_both_legs_at_once(logs: Path, differs: Differs) -> None:
    """The producer computes the prompt in parts, and the consumer reads them while it does."""
    prompt = prompt_of(100)
    with ExitStack() as running:
        in_parts = Settings(engine_args={"max_num_batched_tokens": 32})
        trio = Trio.start(running, logs, "legs", MODEL, in_parts)
        expected = trio.alone.answer(prompt)
        answer, counted = hand_over_at_once(
            trio.producer, trio.consumer, prompt, "both-legs", 64
        )
        assert differs(difference(answer, expected)) < NOISE
        assert counted.by_label("vllm:kvferry_local_recomputes_total", "reason") == {}
        assert counted.total("vllm:kvferry_early_bytes_total") > 0


def test_failed_load_is_recomputed(logs: Path, differs: Differs) -> None:
    """The producer dies between its answer and the load."""
    prompt = prompt_of(40)
    with ExitStack() as running:
        trio = Trio.start(running, logs, "failed", MODEL, Settings())
        assert trio.worst_difference((17,)) < NOISE
        params = trio.producer.prefill(prompt)
        trio.producer.kill()
        answer = trio.consumer.answer(prompt, params, 3)
        assert differs(difference(answer, trio.alone.answer(prompt, tokens=3))) < NOISE
        counted = trio.consumer.metrics()
        assert counted.total("vllm:kvferry_failed_loads_total") == 1
        reasons = counted.by_label("vllm:kvferry_local_recomputes_total", "reason")
        assert reasons == {"load_failed": 1}


def test_preemption(logs: Path, differs: Differs) -> None:
    """Two loaded prompts grow until one of them has to give its blocks back; it is computed again."""
    few = Settings(engine_args={"num_gpu_blocks_override": 6, "max_model_len": 64})
    prompts = [prompt_of(30, number) for number in range(2)]
    with ExitStack() as running:
        trio = Trio.start(running, logs, "preempted", MODEL, Settings(), few)
        offers = [trio.producer.prefill(prompt) for prompt in prompts]
        names = [
            trio.consumer.begin(prompt, params, 20)
            for prompt, params in zip(prompts, offers, strict=True)
        ]
        answers = [trio.consumer.result(name) for name in names]
        alone = [trio.alone.answer(prompt, tokens=20) for prompt in prompts]
        assert differs(max(map(difference, answers, alone))) < NOISE
        counted = trio.consumer.metrics()
        assert counted.total("vllm:kvferry_loads_total") == 2
        assert counted.total("vllm:num_preemptions_total") > 0


def test_abort(logs: Path, differs: Differs) -> None:
    """A request that is aborted while it loads or decodes leaves nothing behind on either side."""
    with ExitStack() as running:
        trio = Trio.start(running, logs, "aborted", MODEL, Settings())
        free = [engine.free_blocks() for engine in (trio.producer, trio.consumer)]
        for number in range(3):
            prompt = prompt_of(40, number)
            name = trio.consumer.begin(prompt, trio.producer.prefill(prompt), 100)
            trio.consumer.abort(name)
        wait_until(
            lambda: (
                [each.free_blocks() for each in (trio.producer, trio.consumer)] == free
            ),
            "all blocks are free",
            timeout_s=60,
        )
        assert differs(trio.worst_difference((40,))) < NOISE
