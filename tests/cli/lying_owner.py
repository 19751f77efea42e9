"""An owner whose memory differs from the offered content in one byte."""

from __future__ import annotations

import numpy as np

from kvferry.cli.bench import owner
from kvferry.cli.bench.cases import content
from kvferry.cli.bench.memory import Memory
from kvferry.cli.bench.pipe import play

CHANGED = 9000


def fill(memory: Memory, seed: int) -> None:
    """Write the expected content with one bit changed."""
    right = content(seed, memory.length)
    right[CHANGED] ^= np.uint8(1)
    memory.write(right)


if __name__ == "__main__":
    owner.fill = fill
    raise SystemExit(play(owner.own))
