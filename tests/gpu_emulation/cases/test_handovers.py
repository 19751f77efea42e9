"""Two engines on the emulated GPU hand over as one engine would answer alone, in float32."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.gpu_emulation.engines import NOISE, Settings, Trio


def test_full_attention(logs: Path) -> None:
    with ExitStack() as running:
        trio = Trio.start(running, logs, "full", "small-llama-4", Settings(), Settings())
        assert trio.worst_difference((17,)) < NOISE
        assert "Using V2 Model Runner" in trio.consumer.log_path.read_text()
