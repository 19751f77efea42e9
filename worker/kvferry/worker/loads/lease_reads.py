"""The reads of one load from what the producer's workers say of its lease: the slot, the row's header, block ids."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from kvferry.protocol.ids import EMPTY
from kvferry.worker.fabric.entry_buffers import EntryBuffer, IdPages, SlotReads
from kvferry.worker.fabric.port import Indices, RemoteDescriptors, Transfer
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.loads.slot_polls import SlotWords
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

    def __init__(
        self, reads: Reads, slot_reads: SlotReads, id_pages: IdPages, slot: int, peer: str
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
        # The words of mapped workers are loaded here; docs/design.md says why the order holds.
        if peer.is_mapped:
            return tuple(route.words(self._slot) for route in peer.mapped_routes())
        return (yield from self._pairs([route.slots for route in peer.routes], self._slot))

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
            # In `self.pages` before anything is posted: the read may fail, and they must not be lost.
            self.pages = yield from self._take(self._id_pages, len(part))
            remote = np.array([first_page + page for page in part], dtype=np.int32)
            local = np.array(self.pages, dtype=np.int32)
            transfer = self._reads.post(self._id_pages.descriptors, local, rows.pages, remote)
            yield from self._finish([transfer])
            ids.update(zip(part, self._id_pages.memory[local], strict=True))
            self._id_pages.give_back(self.pages, self._peer)
            self.pages = ()
        return ids

    def post_slot(self, route: PeerRoute, index: int) -> Transfer:
        """Read the slot on one producer worker into the entry with this index."""
        return self._post(index, route.slots, np.array([self._slot], dtype=np.int32))

    def _pairs(
        self, remotes: Sequence[RemoteDescriptors], index: int
    ) -> Generator[None, None, SlotWords]:
        """Read the same descriptor of each of these lists, and return its two words."""
        if not remotes:
            return ()
        if not self.entries:
            self.entries = yield from self._take(self._slot_reads, len(remotes))
        memory = self._slot_reads.memory
        entries = list(self.entries)
        wanted = np.array([index], dtype=np.int32)
        # EMPTY is no state of a lease: words that a read did not write are never taken for READY.
        memory[entries] = EMPTY
        transfers = [self._post(place, remote, wanted) for place, remote in enumerate(remotes)]
        yield from self._finish(transfers)
        return tuple((int(first), int(second)) for first, second in memory[entries])

    def _take(self, buffer: EntryBuffer, count: int) -> Generator[None, None, tuple[int, ...]]:
        """Take entries of a buffer, when there are enough."""
        taken = buffer.try_take(count, self._peer)
        while taken is None:
            self._waits_for = buffer
            yield
            taken = buffer.try_take(count, self._peer)
        self._waits_for = None
        return taken

    def _post(self, place: int, remote: RemoteDescriptors, wanted: Indices) -> Transfer:
        """Read the wanted descriptor into the entry at this place of those that are held."""
        entry = np.array([self.entries[place]], dtype=np.int32)
        return self._reads.post(self._slot_reads.descriptors, entry, remote, wanted)

    def _finish(self, transfers: list[Transfer]) -> Generator[None, None, None]:
        """Wait until these reads have ended, and give them back."""
        yield from self._reads.until_done(transfers)
        for transfer in transfers:
            self._reads.finished(transfer)
