"""Registered memory in equal entries, in which small reads land: lease slots, and pages of block ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from kvferry.protocol.ids import EMPTY
from kvferry.protocol.stream_rows import PAGE_IDS
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    LocalDescriptors,
    MemoryKind,
    Region,
)


@dataclass(frozen=True, slots=True)
class EntriesSnapshot:
    """Attributes:
    count: of all entries.
    free: those that nobody has taken.
    """

    count: int
    free: tuple[int, ...]

    @property
    def taken(self) -> int:
        return self.count - len(self.free)


class EntryBuffer:
    """Memory in equal entries. An entry belongs to one reader until it is given back.

    Attributes:
        memory: `[entries, numbers of an entry]`.
        given_back: how often entries were given back.
        descriptors: of all entries, once `prepare` has made them: descriptor `i` is entry `i`.
    """

    descriptors: LocalDescriptors

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.given_back = 0
        # A stack, the lowest entry on top.
        self._free = list(range(len(memory) - 1, -1, -1))
        self._held: Counter[str] = Counter()

    def region(self) -> Region:
        """The memory to register."""
        return Region(int(self.memory.ctypes.data), self.memory.nbytes, MemoryKind.DRAM)

    def prepare(self, fabric: Fabric) -> None:
        """Make the descriptors, once the region is registered."""
        entries = len(self.memory)
        entry_bytes = self.memory.nbytes // entries
        row = (int(self.memory.ctypes.data), entry_bytes, 0, entry_bytes, entries)
        self.descriptors = fabric.prepare_local(
            DescriptorRows.from_tuples(MemoryKind.DRAM, [row])
        )

    def try_take(self, count: int, peer: str | None = None) -> tuple[int, ...] | None:
        """`count` entries, or None when there are not as many.

        Args:
            peer: the peer to be read from, for its share; None for no peer's, which may be all.
        """
        # Whoever needs none waits for none, however many the peer holds.
        if not count:
            return ()
        must_stay_free = 0
        if peer is not None:
            # Reads of a peer that stands still keep their entries until it goes on. So a peer gets
            # no entry that would leave fewer free than it then has: whatever peers stand still,
            # there are some for the next one.
            must_stay_free = self._held[peer] + count
        if len(self._free) - count < must_stay_free:
            return None
        if peer is not None:
            self._held[peer] += count
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, entries: tuple[int, ...], peer: str | None = None) -> None:
        """Return entries that no read can write any more, and that were taken for `peer`."""
        if not entries:
            return
        self.given_back += 1
        self._free.extend(entries)
        if peer is None:
            return
        self._held[peer] -= len(entries)
        # Peers come and go under new names for as long as the worker lives.
        if self._held[peer] == 0:
            del self._held[peer]

    def free(self) -> int:
        """Number of free entries."""
        return len(self._free)

    def snapshot(self) -> EntriesSnapshot:
        return EntriesSnapshot(len(self.memory), tuple(self._free))


class SlotReads(EntryBuffer):
    """Where slots and the headers of rows land, of two words each.

    Attributes:
        words: uint64 `[entries]`, the first word of each entry: a slot's epoch and state.
        progress: uint64 `[entries]`, the second word.
    """

    def __init__(self, entries: int) -> None:
        # The word of a slot without a lease: an entry that no read has written yet grants nothing.
        super().__init__(np.full((entries, 2), EMPTY, dtype=np.uint64))
        self.words = self.memory[:, 0]
        self.progress = self.memory[:, 1]


ID_PAGES = 256


class IdPages(EntryBuffer):
    """Where pages of a row's block ids land: uint32 `[ID_PAGES, PAGE_IDS]`."""

    def __init__(self) -> None:
        super().__init__(np.zeros((ID_PAGES, PAGE_IDS), dtype=np.uint32))
