"""An owner whose memory differs from the offered content in one byte."""

from __future__ import annotations

import numpy as np

from kvferry.cli.transfer import process
from kvferry.cli.transfer.child import play
from kvferry.cli.transfer.memory import Bytes, content

CHANGED = 9000


def changed_content(seed: int, length: int) -> Bytes:
    """The expected content with one bit changed."""
    right = content(seed, length)
    right[CHANGED] ^= np.uint8(1)
    return right


if __name__ == "__main__":
    vars(process)["content"] = changed_content
    raise SystemExit(play(process.run))
