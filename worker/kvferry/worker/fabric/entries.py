"""Equal entries of memory: lease slots, the headers of rows, pages of block ids. Reads of a producer's, and the memory
of this worker in which they land.

Of workers that are mapped the entries are loaded here; docs/design.md says why the order of loads is enough. Of the
others they are read over the fabric, each into an entry of this worker. What a load or a poll does with them is the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.slots import EMPTY, PAGE_IDS
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    Indices,
    LocalDescriptors,
    MemoryKind,
    Region,
    RemoteDescriptors,
    Transfer,
)
from kvferry.worker.fabric.reads import Reads


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
        taken = tuple(reversed(self._free[-count:]))
        del self._free[-count:]
        return taken

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


@dataclass(frozen=True, slots=True)
class RemoteEntries:
    """Equal entries in a producer worker's memory.

    Attributes:
        descriptors: descriptor `i` is entry `i`.
        mapped: the same memory as an array `[entries, numbers of an entry]`; None where it is not mapped.
    """

    descriptors: RemoteDescriptors
    mapped: NDArray[Any] | None


def entries_needed(sources: Sequence[RemoteEntries], wanted: int) -> int:
    """How many entries of this worker such a read needs: none of those that are mapped."""
    needed = 0
    for source in sources:
        if source.mapped is None:
            needed += wanted
    return needed


def mapped_words(
    sources: Sequence[RemoteEntries], index: int
) -> tuple[tuple[int, int], ...] | None:
    """The two words of one entry of each source, loaded now, the first word first; None if one is not mapped."""
    # Not an `EntryRead`: its arrays take ten times as long as the two loads, twice in every load.
    words: list[tuple[int, int]] = []
    for source in sources:
        if source.mapped is None:
            return None
        first, second = source.mapped[index].tolist()
        words.append((first, second))
    return tuple(words)


@dataclass(slots=True, eq=False)
class EntryRead:
    """A read of the same entries of every worker of a producer.

    Attributes:
        wanted: the entries, the same of each source.
        buffer: that `entries` belong to.
        entries: where they are read to, `entries_needed` of them: all of the first source that is read, then those of
            the next one.
        transfers: the reads over the fabric.
    """

    sources: Sequence[RemoteEntries]
    wanted: Indices
    buffer: EntryBuffer
    entries: tuple[int, ...]
    transfers: list[Transfer] = field(default_factory=list)

    def post(self, reads: Reads) -> None:
        """Begin it; `reads` settles it.

        Raises:
            FabricError: the fabric refuses one. Those before it are in `transfers`.
        """
        # All of it is mapped: nothing is to be done before the values are loaded.
        if not self.entries:
            return
        entries = np.array(self.entries, dtype=np.int32)
        # No lease has this word: an entry that no read has written is never taken for READY.
        self.buffer.memory[entries] = EMPTY
        count = len(self.wanted)
        first = 0
        for source in self.sources:
            if source.mapped is not None:
                continue
            into = entries[first : first + count]
            first += count
            transfer = reads.post(
                self.buffer.descriptors, into, source.descriptors, self.wanted
            )
            self.transfers.append(transfer)

    def values(self) -> NDArray[Any]:
        """What was read, `[wanted, sources, numbers of an entry]`; a copy. Call it when the transfers have ended."""
        count = len(self.wanted)
        first = 0
        columns: list[NDArray[Any]] = []
        for source in self.sources:
            if source.mapped is not None:
                columns.append(source.mapped[self.wanted])
                continue
            columns.append(
                self.buffer.memory[list(self.entries[first : first + count])]
            )
            first += count
        return np.stack(columns, axis=1)
