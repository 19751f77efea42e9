"""The reads of one load from what the producer's workers say of its lease: the slot, the row's header, block ids."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from kvferry.protocol.ids import EMPTY
from kvferry.worker.fabric.port import Indices, RemoteDescriptors, Transfer
from kvferry.worker.fabric.reads import IdPages, Reads, SlotReads
from kvferry.worker.loads.slot_watch import SlotWords
from kvferry.worker.peers.peer import Peer, PeerRoute, PreparedRows

_PAGES_AT_ONCE = 8


class LeaseReads:
    """Reads of one lease; each ends, and is given back, before the next one begins.

    Args:
        reads: the load's, which settles them.

    Attributes:
        entries: where slots and headers are read to; kept from one read to the next.
        pages: where ids are read to.
    """

    def __init__(self, reads: Reads, slot_reads: SlotReads, id_pages: IdPages, slot: int) -> None:
        self.entries: tuple[int, ...] = ()
        self.pages: tuple[int, ...] = ()
        self._reads = reads
        self._slot_reads = slot_reads
        self._id_pages = id_pages
        self._slot = slot

    def give_back(self) -> None:
        """Give the memory back. Call it when none of the load's reads can write any more."""
        self._slot_reads.give_back(self.entries)
        self._id_pages.give_back(self.pages)
        self.entries = self.pages = ()

    def slots(self, peer: Peer) -> Generator[None, None, SlotWords]:
        """Read the slot on every producer worker; no words if this worker reads nothing from any.

        Raises:
            FabricError: a read failed.
        """
        return (yield from self._pairs([route.slots for route in peer.routes], self._slot))

    def headers(self, peer_rows: Sequence[PreparedRows], row: int) -> Generator[None, None, SlotWords]:
        """Read the two words of a row's header on every producer worker.

        Raises:
            FabricError: a read failed.
        """
        return (yield from self._pairs([rows.headers for rows in peer_rows], row))

    def ids(self, rows: PreparedRows, row: int, pages: Sequence[int]) -> Generator[None, None, dict[int, np.ndarray]]:
        """Read pages of a row's ids: uint32 `[PAGE_IDS]` by page.

        Raises:
            FabricError: a read failed.
        """
        found: dict[int, np.ndarray] = {}
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            part = pages[first : first + _PAGES_AT_ONCE]
            while not (taken := self._id_pages.try_take(len(part))):
                yield
            self.pages = taken
            remote = np.array([row * rows.rows.pages + page for page in part], dtype=np.int32)
            local = np.array(taken, dtype=np.int32)
            yield from self._finish([self._reads.post(self._id_pages.descriptors, local, rows.pages, remote)])
            found.update(zip(part, self._id_pages.memory[local], strict=True))
            self._id_pages.give_back(taken)
            self.pages = ()
        return found

    def post_slot(self, route: PeerRoute, index: int) -> Transfer:
        """Read the slot on one producer worker into the entry with this index."""
        return self._post(index, route.slots, np.array([self._slot], dtype=np.int32))

    def _pairs(self, remotes: Sequence[RemoteDescriptors], index: int) -> Generator[None, None, SlotWords]:
        """Read the same descriptor of each of these lists."""
        if not remotes:
            return ()
        while not self.entries:
            self.entries = self._slot_reads.try_take(len(remotes)) or ()
            if not self.entries:
                yield
        memory, where, wanted = self._slot_reads.memory, list(self.entries), np.array([index], dtype=np.int32)
        memory[where] = EMPTY
        yield from self._finish([self._post(place, remote, wanted) for place, remote in enumerate(remotes)])
        return tuple((int(one), int(two)) for one, two in memory[where])

    def _post(self, place: int, remote: RemoteDescriptors, wanted: Indices) -> Transfer:
        entry = np.array([self.entries[place]], dtype=np.int32)
        return self._reads.post(self._slot_reads.descriptors, entry, remote, wanted)

    def _finish(self, transfers: list[Transfer]) -> Generator[None, None, None]:
        yield from self._reads.until_done(transfers)
        for transfer in transfers:
            self._reads.finished(transfer)
