"""Sleeps with vLLM's own allocator: it unmaps the caches' pages, and whoever touches them then ends the process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.gpu_emulation.engines import (
    MAPPED,
    NOISE,
    Settings,
    Trio,
    is_mapped,
    prompt_of,
)
from tests.vllm.forked_engine import ForkedEngine

SLEEPING = Settings(engine_args={"enable_sleep_mode": True}, extra_config=MAPPED)
FREED = "CuMemAllocator: sleep freed"


def test_prompts_are_handed_over_after_every_sleep(
    logs: Path, differs: Callable[[float], float]
) -> None:
    with ExitStack() as running:
        trio = Trio.start(
            running, logs, "sleep", "small-llama-4", SLEEPING, alone=Settings()
        )
        worst = trio.worst_difference((17,))
        # The driver has no handles for pages that can go: NIXL reads, although mapped reads are asked for.
        assert not is_mapped(trio.consumer)
        assert "sleep mode's allocator" in trio.consumer.log_path.read_text()
        for sleeper in (trio.producer, trio.consumer, trio.producer):
            # A lease that is held, and a ticket of before.
            stale = trio.producer.prefill(prompt_of(23))
            sleeper.sleep()
            sleeper.wake_up()
            worst = max(worst, trio.worst_difference((17, 40)))
            told = trio.consumer.ask(prompt_of(23), stale, tokens=3)
            assert told == trio.alone.ask(prompt_of(23), tokens=3)
        assert differs(worst) < NOISE
        assert sleeps_of(trio.producer) == 2
        assert sleeps_of(trio.consumer) == 1


def sleeps_of(engine: ForkedEngine) -> int:
    """How often vLLM's allocator has taken this engine's pages away, by its log."""
    return engine.log_path.read_text().count(FREED)
