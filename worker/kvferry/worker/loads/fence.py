"""The fence of a load: the slot of its lease, read before the data and after it.

A producer changes the slot before it gives a block away. So data that was read between two readings of READY under the
same epoch is what the lease promised, however long the read took and whatever else was written meanwhile.

`LeaseReads` reads what the producer's workers say of the lease: its slot and, of a prompt that is being computed, the
header of its row and its block ids.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence

import numpy as np

from kvferry.protocol.ids import (
    Epoch,
    epoch_from_text,
)
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.slots import (
    SlotState,
    slot_word,
)
from kvferry.worker.fabric.entries import (
    EntryBuffer,
    EntryRead,
    IdPages,
    RemoteEntries,
    SlotReads,
    entries_needed,
    mapped_words,
)
from kvferry.worker.fabric.errors import PeerLost
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.loads.slot_watch import SlotWords, Steps, Wait
from kvferry.worker.loads.state import LoadFailed, Progress
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
        return (yield from self._pairs(peer.slots, self._slot))

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
        words = mapped_words(sources, index)
        if words is not None:
            return words
        if not self.entries:
            needed = entries_needed(sources, 1)
            self.entries = yield from self._take(self._slot_reads, needed)
        wanted = np.array([index], dtype=np.int32)
        read = EntryRead(sources, wanted, self._slot_reads, self.entries)
        yield from self._finish(read)
        words_read: list[tuple[int, int]] = []
        for state, progress in read.values()[0].tolist():
            words_read.append((state, progress))
        return tuple(words_read)

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


class LeaseFence:
    """The slot of one load's lease, on every producer worker that the load reads from.

    Args:
        source: the params that name the lease.
        lease_reads: read the slot.
        progress: of the load.
        ordered_s: when the load was ordered, on the monotonic clock.

    Attributes:
        epoch: that the lease must have after the data. A streamed read changes it when the producer has preempted the
            prompt.
        read_s: when the reading of the slot began that the last words are from: they are at least as new.
        opens_until_s: until when the producer may open the slot.
    """

    __slots__ = (
        "_lease_reads",
        "_progress",
        "_source",
        "epoch",
        "opens_until_s",
        "read_s",
    )

    def __init__(
        self,
        source: RemotePrefill,
        lease_reads: LeaseReads,
        progress: Progress,
        ordered_s: float,
    ) -> None:
        self.epoch: Epoch = epoch_from_text(source.kvferry.lease_epoch)
        self.read_s = -math.inf
        self.opens_until_s = ordered_s + source.kvferry.opens_within_s
        self._source = source
        self._lease_reads = lease_reads
        self._progress = progress

    def wait_until_ready(self, peer: Peer) -> Steps:
        """The fence before the data: wait until the slot is READY on every producer worker.

        Raises:
            LoadFailed: the lease has ended.
            FabricError: the slot cannot be read.
        """
        may_be_unopened = True
        words = yield from self.read_slot(peer)
        while not self.is_ready(words):
            ready = slot_word(self.epoch, SlotState.READY)
            computing = slot_word(self.epoch, SlotState.COMPUTING)
            is_open = all(state in (ready, computing) for state, _ in words)
            if is_open:
                # It was open: from now on any other word says that the lease has ended.
                may_be_unopened = False
                words = yield from self.wait_for_change(peer, words, math.inf)
                continue
            # Both legs of a request may arrive at once, so the slot may not be open yet. The time is judged by when
            # the reading began: a slot that opened while this process stood still is found open.
            if not may_be_unopened or self.read_s >= self.opens_until_s:
                raise LoadFailed(
                    FailureReason.FENCE, "the lease had ended before the read"
                )
            words = yield from self.wait_for_change(peer, words, self.opens_until_s)

    def check_after(self, peer: Peer) -> Steps:
        """The fence after the data: only READY on every producer worker is good.

        Raises:
            LoadFailed: the lease has ended, so the blocks may have been given away during the read.
            FabricError: the slot cannot be read.
        """
        words = yield from self.read_slot(peer)
        if not self.is_ready(words):
            raise LoadFailed(FailureReason.FENCE, "the lease had ended after the read")

    def is_ready(self, words: SlotWords) -> bool:
        """Whether every producer worker says READY under the epoch of this load."""
        ready = slot_word(self.epoch, SlotState.READY)
        return all(state == ready for state, _ in words)

    def read_slot(self, peer: Peer) -> Generator[None, None, SlotWords]:
        """Read the slot's words now.

        Raises:
            FabricError: the slot cannot be read, or the words say nothing of the data.
        """
        self._progress.turn = peer.data_reads.turn
        self.read_s = time.monotonic()
        words = yield from self._lease_reads.slots(peer)
        # The words lie in a file, and stay as they are when the process dies. Mapped memory of a device need not.
        if peer.mapped_routes and peer.may_be_freed():
            raise PeerLost("read a slot", "its process has ended", str(peer.key))
        return words

    def wait_for_change(
        self, peer: Peer, words: SlotWords, until_s: float
    ) -> Generator[Wait | None, None, SlotWords]:
        """Park until the slot's words are others than these, or until a time. Returns the words."""
        wait = Wait(
            peer=peer,
            slot=self._source.kvferry.lease_slot,
            words=words,
            epoch=self.epoch,
            num_tokens=self._source.remote_num_tokens,
            until_s=until_s,
        )
        # A parked load holds nothing: thousands of them may wait for one slow producer, and the watch has entries of
        # its own.
        self._lease_reads.give_back()
        self._progress.turn = peer.data_reads.turn
        yield wait
        if wait.error is not None:
            raise wait.error
        self.read_s = wait.read_s
        if wait.words != words:
            self._progress.changes += 1
        return wait.words
