"""The cases of the benchmark: sizes by powers of four, in one descriptor and in runs of 16 KiB.

The owner's memory has known content, so that copies can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.cli.bench.messages import MIN_BYTES, Kind

RUN_BYTES = 16 << 10
"""The published knee: shorter descriptors are slow. Also the block of one head in many caches."""
_STEP = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Reads of `num_bytes` in descriptors of `run_bytes`."""

    kind: Kind
    num_bytes: int
    run_bytes: int

    @property
    def descriptors(self) -> int:
        """The number of descriptors of one read."""
        return self.num_bytes // self.run_bytes


def cases_of(kind: Kind, max_bytes: int) -> list[Case]:
    """4 KiB, 16 KiB … up to `max_bytes`: each in one descriptor; those of several runs also scattered."""
    found: list[Case] = []
    num_bytes = MIN_BYTES
    while num_bytes <= max_bytes:
        found.append(Case(kind, num_bytes, num_bytes))
        if num_bytes > RUN_BYTES:
            found.append(Case(kind, num_bytes, RUN_BYTES))
        num_bytes *= _STEP
    return found


Bytes = npt.NDArray[np.uint8]


def content(seed: int, length: int) -> Bytes:
    """`length` bytes, a multiple of 8; a prefix of every longer content of the same seed.

    The same on every machine and with every numpy, whose raw streams are fixed.
    """
    return np.random.PCG64(seed).random_raw(length // 8).astype("<u8", copy=False).view(np.uint8)


def count_wrong(found: Bytes, expected: Bytes) -> tuple[int, int]:
    """(bytes that differ, offset of the first of them or -1); the lengths are equal, and multiples of 8."""
    if np.array_equal(found.view(np.uint64), expected.view(np.uint64)):
        return 0, -1
    differs = found != expected
    return int(np.count_nonzero(differs)), int(np.argmax(differs))
