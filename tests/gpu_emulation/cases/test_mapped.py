"""Two engines on the emulated GPU, of which one reads the other's cache where it lies: over CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu_emulation.engines import MAPPED, NOISE, Settings, Trio, is_mapped


@pytest.mark.parametrize("block_size", [16, 64])
def test_a_mapped_cache(
    block_size: int, logs: Path, differs: Callable[[float], float]
) -> None:
    """Of equal engines, and of blocks of 16 to 64 tokens."""
    producer = Settings(extra_config=MAPPED)
    consumer = Settings(block_size=block_size, extra_config=MAPPED)
    with ExitStack() as running:
        name = f"mapped-{block_size}"
        trio = Trio.start(running, logs, name, "small-llama-4", producer, consumer)
        assert differs(trio.worst_difference((17, 70))) < NOISE
        assert is_mapped(trio.consumer)
