"""The reads of one load from what the producer's workers say of its lease: slots."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from kvferry.protocol.ids import EMPTY
from kvferry.worker.fabric.port import Transfer
from kvferry.worker.fabric.reads import Reads, SlotReads
from kvferry.worker.loads.slot_watch import SlotWords
from kvferry.worker.peers.peer import Peer, PeerRoute


class LeaseReads:
    """Reads of one lease; each ends, and is given back, before the next one begins.

    Args:
        reads: the load's, which settles them.

    Attributes:
        entries: where slots are read to; kept from one read to the next.
    """

    def __init__(self, reads: Reads, slot_reads: SlotReads, slot: int) -> None:
        self.entries: tuple[int, ...] = ()
        self._reads = reads
        self._slot_reads = slot_reads
        self._slot = slot

    def give_back(self) -> None:
        """Give the memory back. Call it when none of the load's reads can write any more."""
        self._slot_reads.give_back(self.entries)
        self.entries = ()

    def slots(self, peer: Peer) -> Generator[None, None, SlotWords]:
        """Read the slot on every producer worker; no words if this worker reads nothing from any.

        Raises:
            FabricError: a read failed.
        """
        if not peer.routes:
            return ()
        while not self.entries:
            self.entries = self._slot_reads.try_take(len(peer.routes)) or ()
            if not self.entries:
                yield
        pairs, where = self._slot_reads.pairs, list(self.entries)
        pairs[where] = EMPTY
        transfers = [self.post_slot(route, index) for index, route in enumerate(peer.routes)]
        yield from self._reads.until_done(transfers)
        for transfer in transfers:
            self._reads.finished(transfer)
        return tuple((int(state), int(progress)) for state, progress in pairs[where])

    def post_slot(self, route: PeerRoute, index: int) -> Transfer:
        """Read the slot on one producer worker into the entry with this index."""
        entry, slot = (np.array([one], dtype=np.int32) for one in (self.entries[index], self._slot))
        return self._reads.post(self._slot_reads.descriptors, entry, route.slots, slot)
