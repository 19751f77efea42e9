"""A read of the same entries of every worker of a producer: its slots, the headers of its rows, pages of block ids.

Of workers that are mapped they are loaded here; docs/design.md says why the order of loads is enough. Of the others
they are read over the fabric, each into an entry of this worker. What a load or a poll does with them is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.ids import EMPTY
from kvferry.worker.fabric.entry_buffers import EntryBuffer
from kvferry.worker.fabric.port import Indices, Transfer
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.peers.peer import RemoteEntries


def entries_needed(sources: Sequence[RemoteEntries], wanted: int) -> int:
    """How many entries of this worker such a read needs: none of those that are mapped."""
    return wanted * sum(source.mapped is None for source in sources)


@dataclass(slots=True, eq=False)
class EntryRead:
    """See the module.

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
