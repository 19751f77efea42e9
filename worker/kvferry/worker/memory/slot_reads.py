"""Destination of slot reads: a small registered array of words, handed out one by one."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from kvferry.protocol.ids import EMPTY, SLOT_BYTES
from kvferry.worker.fabric.port import DescriptorRows, Fabric, LocalDescriptors, MemoryKind, Region


class SlotReads:
    """Words that slot reads are written to. An entry belongs to one reader until it is given back.

    Attributes:
        words: uint64 `[entries]`.
    """

    def __init__(self, entries: int) -> None:
        self.words = np.full(entries, EMPTY, dtype=np.uint64)
        self._free = list(range(entries - 1, -1, -1))
        self._descriptors: LocalDescriptors | None = None

    def region(self) -> Region:
        """The memory to register."""
        return Region(int(self.words.ctypes.data), self.words.nbytes, MemoryKind.DRAM)

    def prepare(self, fabric: Fabric) -> None:
        """Make descriptors of all entries: descriptor `i` is entry `i`."""
        row = (int(self.words.ctypes.data), SLOT_BYTES, 0, SLOT_BYTES, len(self.words))
        self._descriptors = fabric.prepare_local(DescriptorRows.of(MemoryKind.DRAM, [row]))

    @property
    def descriptors(self) -> LocalDescriptors:
        if self._descriptors is None:
            raise RuntimeError("the slot reads have not been prepared")
        return self._descriptors

    @property
    def is_prepared(self) -> bool:
        """Whether the fabric has a list of the entries."""
        return self._descriptors is not None

    def try_take(self, count: int) -> tuple[int, ...] | None:
        """`count` entries, or None when there are not as many free."""
        if len(self._free) < count:
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, entries: tuple[int, ...]) -> None:
        """Return entries that no read can write any more."""
        self._free.extend(entries)

    def free(self) -> int:
        """Number of free entries."""
        return len(self._free)

    def free_entries(self) -> Set[int]:
        """The free entries."""
        return set(self._free)
