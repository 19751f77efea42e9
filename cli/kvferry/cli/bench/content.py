"""What the owner's memory holds, and what of a copy of it is wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def content(seed: int, length: int) -> Bytes:
    """`length` bytes, a multiple of 8; of a longer one it is the beginning.

    The same on every machine and with every numpy, whose raw streams are fixed.
    """
    return np.random.PCG64(seed).random_raw(length // 8).astype("<u8", copy=False).view(np.uint8)


def count_wrong(found: Bytes, expected: Bytes) -> tuple[int, int]:
    """(bytes that differ, offset of the first of them or -1); the lengths are equal, and multiples of 8."""
    if np.array_equal(found.view(np.uint64), expected.view(np.uint64)):
        return 0, -1
    differs = found != expected
    return int(np.count_nonzero(differs)), int(np.argmax(differs))
