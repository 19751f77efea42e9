"""The reads of one load from what the producer's workers say of its lease: the slot, the row's header, block ids."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from kvferry.worker.fabric.entries import (
    EntryBuffer,
    EntryRead,
    IdPages,
    RemoteEntries,
    SlotReads,
    entries_needed,
)
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.loads.slot_watch import SlotWords
from kvferry.worker.peers.peer import Peer, PeerRoute, PreparedRows

_PAGES_AT_ONCE = 8
"""Most pages that one read takes. The pages of the worker are shared by all its loads."""


class LeaseReads:
    """Reads of one lease; each ends, and is given back, before the next one begins.

    Args:
        reads: the load's, which settles them.
        peer: for the fairness of entries and pages.

    Attributes:
        entries: where slots and headers are read to; kept from one read to the next.
        pages: where ids are read to.
    """

    __slots__ = (
        "_id_pages",
        "_peer",
        "_reads",
        "_slot",
        "_slot_reads",
        "_waits_for",
        "entries",
        "pages",
    )

    def __init__(
        self,
        reads: Reads,
        slot_reads: SlotReads,
        id_pages: IdPages,
        slot: int,
        peer: str,
    ) -> None:
        self.entries: tuple[int, ...] = ()
        self.pages: tuple[int, ...] = ()
        self._peer = peer
        self._waits_for: EntryBuffer | None = None
        self._reads = reads
        self._slot_reads = slot_reads
        self._id_pages = id_pages
        self._slot = slot

    def give_back(self) -> None:
        """Give the memory back. Call it when none of the load's reads can write any more."""
        self._slot_reads.give_back(self.entries, self._peer)
        self._id_pages.give_back(self.pages, self._peer)
        self.entries = ()
        self.pages = ()

    @property
    def queue_moves(self) -> int:
        """While it waits for entries or pages: grows when others give some back."""
        if self._waits_for is None:
            return 0
        return self._waits_for.given_back

    def slots(self, peer: Peer) -> Generator[None, None, SlotWords]:
        """Read the slot on every producer worker; no words if this worker reads nothing from any.

        Raises:
            FabricError: a read failed.
        """
        return (
            yield from self._pairs([route.slots for route in peer.routes], self._slot)
        )

    def headers(
        self, peer_rows: Sequence[PreparedRows], row: int
    ) -> Generator[None, None, SlotWords]:
        """Read the two words of a row's header on every producer worker.

        Raises:
            FabricError: a read failed.
        """
        return (yield from self._pairs([rows.headers for rows in peer_rows], row))

    def ids(
        self, rows: PreparedRows, row: int, pages: Sequence[int]
    ) -> Generator[None, None, dict[int, np.ndarray]]:
        """Read pages of a row's ids: uint32 `[PAGE_IDS]` by page.

        Raises:
            FabricError: a read failed.
        """
        ids: dict[int, np.ndarray] = {}
        first_page = row * rows.rows.pages
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            part = pages[first : first + _PAGES_AT_ONCE]
            wanted = np.array([first_page + page for page in part], dtype=np.int32)
            # In `self.pages` before anything is posted: the read may fail, and they must not be lost.
            needed = entries_needed([rows.pages], len(part))
            self.pages = yield from self._take(self._id_pages, needed)
            read = EntryRead([rows.pages], wanted, self._id_pages, self.pages)
            yield from self._finish(read)
            ids.update(zip(part, read.values()[:, 0], strict=True))
            self._id_pages.give_back(self.pages, self._peer)
            self.pages = ()
        return ids

    def post_slot(self, route: PeerRoute) -> None:
        """Read the slot on one producer worker, for nothing. Mapped ones are not read, nor is any before the first
        `slots` or after `give_back`."""
        if self.entries and route.slots.mapped is None:
            wanted = np.array([self._slot], dtype=np.int32)
            EntryRead([route.slots], wanted, self._slot_reads, self.entries[:1]).post(
                self._reads
            )

    def _pairs(
        self, sources: Sequence[RemoteEntries], index: int
    ) -> Generator[None, None, SlotWords]:
        """Read the same entry of each of these, and return its two words."""
        if not sources:
            return ()
        if not self.entries:
            needed = entries_needed(sources, 1)
            self.entries = yield from self._take(self._slot_reads, needed)
        wanted = np.array([index], dtype=np.int32)
        read = EntryRead(sources, wanted, self._slot_reads, self.entries)
        yield from self._finish(read)
        return tuple((state, progress) for state, progress in read.values()[0].tolist())

    def _take(
        self, buffer: EntryBuffer, count: int
    ) -> Generator[None, None, tuple[int, ...]]:
        """Take entries of a buffer, when there are enough."""
        taken = buffer.try_take(count, self._peer)
        while taken is None:
            self._waits_for = buffer
            yield
            taken = buffer.try_take(count, self._peer)
        self._waits_for = None
        return taken

    def _finish(self, read: EntryRead) -> Generator[None, None, None]:
        """Post a read, wait until it has ended, and give its transfers back."""
        read.post(self._reads)
        yield from self._reads.until_done(read.transfers)
        for transfer in read.transfers:
            self._reads.finished(transfer)
