"""The fence of a load: the slot of its lease, read before the data and after it.

A producer changes the slot before it gives a block away. So data that was read between two readings of READY under the
same epoch is what the lease promised, however long the read took and whatever else was written meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator

from kvferry.protocol.ids import Epoch, SlotState, epoch_from_text, slot_word
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.params import RemotePrefill
from kvferry.worker.fabric.errors import PeerLost
from kvferry.worker.loads.context import LoadFailed, Steps
from kvferry.worker.loads.lease_reads import LeaseReads
from kvferry.worker.loads.slot_watch import SlotWords, Wait
from kvferry.worker.loads.state import Progress
from kvferry.worker.peers.peer import Peer


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
        ready = self._word(SlotState.READY)
        computing = self._word(SlotState.COMPUTING)
        may_be_unopened = True
        words = yield from self.read_slot(peer)
        while not self.is_ready(words):
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
        ready = self._word(SlotState.READY)
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
        if peer.may_be_freed():
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

    def _word(self, state: SlotState) -> int:
        return slot_word(self.epoch, state)
