"""Faults in what a GPU does for kvferry are seen in the answers. That an event is recorded on another stream is not
seen here, where all work is done at once, but by `tests/worker/device/test_mutants.py`."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_emulation.engines import (
    MAPPED,
    NOISE,
    Settings,
    Trio,
    is_mapped,
    prompt_of,
)
from tests.vllm.forked_engine import difference, hand_over

MODEL = "small-llama-4"
PROMPT = prompt_of(40)
TOKENS = 3


@pytest.fixture(params=["read", "mapped"])
def trio(logs: Path, request: pytest.FixtureRequest) -> Any:
    """A pair of unequal blocks, which needs the relayout: of what NIXL has read, or of the memory that is mapped over
    CUDA IPC. It hands over well before the fault."""
    extra = MAPPED if request.param == "mapped" else {}
    with ExitStack() as running:
        trio = Trio.start(
            running,
            logs,
            f"fault-{request.param}",
            MODEL,
            Settings(extra_config=extra),
            Settings(block_size=64, extra_config=extra),
        )
        assert trio.worst_difference((len(PROMPT),), TOKENS) < NOISE
        assert is_mapped(trio.consumer) == bool(extra)
        yield trio


def test_a_bit_is_inverted_in_the_memory_that_is_read(trio: Trio) -> None:
    params = trio.producer.prefill(PROMPT)
    (layer, *_), *_ = trio.producer.groups()
    trio.producer.flip_a_byte(layer, params["remote_block_ids"][0][0])
    answer = trio.consumer.answer(PROMPT, params, TOKENS)
    assert difference(answer, trio.alone.answer(PROMPT, tokens=TOKENS)) > NOISE


def test_a_kernel_is_not_launched(trio: Trio) -> None:
    prompt = prompt_of(40, 1)
    trio.consumer.on_workers(leave_out_the_relayout)
    answer, _ = hand_over(trio.producer, trio.consumer, prompt, TOKENS)
    assert difference(answer, trio.alone.answer(prompt, tokens=TOKENS)) > NOISE


def leave_out_the_relayout(_worker: Any) -> None:
    relayout: Any = importlib.import_module("kvferry.worker.relayout.triton_relayout")

    def nothing(**_launch: Any) -> None:
        pass

    relayout.launch_relayout = nothing
