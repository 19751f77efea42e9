"""Where lease slots are read to: a small registered array of words, given out one by one."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from kvferry.protocol.ids import EMPTY, SLOT_BYTES
from kvferry.worker.fabric.port import DescriptorRows, Fabric, LocalDescriptors, MemoryKind, Region


class Landing:
    """Words that slot reads land in. A cell belongs to one reader until it is given back.

    Attributes:
        words: uint64 `[cells]`.
    """

    def __init__(self, cells: int) -> None:
        self.words = np.full(cells, EMPTY, dtype=np.uint64)
        self._free = list(range(cells - 1, -1, -1))
        self._descriptors: LocalDescriptors | None = None

    def region(self) -> Region:
        """The memory to register."""
        return Region(int(self.words.ctypes.data), self.words.nbytes, MemoryKind.DRAM)

    def prepare(self, fabric: Fabric) -> None:
        """Make descriptors of all cells: descriptor `i` is cell `i`."""
        row = (int(self.words.ctypes.data), SLOT_BYTES, 0, SLOT_BYTES, len(self.words))
        self._descriptors = fabric.prepare_local(DescriptorRows.of(MemoryKind.DRAM, [row]))

    @property
    def descriptors(self) -> LocalDescriptors:
        if self._descriptors is None:
            raise RuntimeError("the landing has not been prepared")
        return self._descriptors

    @property
    def is_prepared(self) -> bool:
        """Whether the fabric has a list of the cells."""
        return self._descriptors is not None

    def try_take(self, count: int) -> tuple[int, ...] | None:
        """`count` cells, or None when there are not as many free."""
        if len(self._free) < count:
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, cells: tuple[int, ...]) -> None:
        """Cells that nothing is read into any more."""
        self._free.extend(cells)

    def free(self) -> int:
        """Cells that nobody has."""
        return len(self._free)

    def free_cells(self) -> Set[int]:
        """Which they are."""
        return set(self._free)
