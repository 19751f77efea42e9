"""The slots that loads wait for, read together: one read from each producer worker serves all loads from it.

A load that waits has nothing in flight and holds no entries: the watch's reads have entries of their own. When they
begin is `poll_schedule`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.worker.fabric.entry_buffers import SlotReads
from kvferry.worker.fabric.errors import FabricError, PeerLost, internal_errors
from kvferry.worker.fabric.port import TransferState
from kvferry.worker.fabric.reads import FabricReader
from kvferry.worker.loads.entry_reads import EntryRead, entries_needed
from kvferry.worker.loads.poll_schedule import PollSchedule
from kvferry.worker.loads.slot_polls import SlotPoll, Wait, WaitBatch
from kvferry.worker.peers.peer import Peer

_MAX_ENTRIES = 1024
"""Most entries of one poll; the slots of more loads are polled in turn."""


@dataclass(slots=True, eq=False)
class _WatchedPeer:
    """One peer: its waits, and the poll in flight.

    Attributes:
        missing: most tokens that any wait lacks.
        batches: the waits by slot, as polls take them in turn; empty when they have to be divided again.
    """

    peer: Peer
    schedule: PollSchedule
    missing: int = 0
    waits: set[Wait] = field(default_factory=set)
    batches: deque[WaitBatch] = field(default_factory=deque)
    poll: SlotPoll | None = None

    def next_batch(self) -> WaitBatch:
        if not self.batches:
            # By slot: neighbours of the producer's table are read as one run.
            waits = sorted(self.waits, key=lambda wait: wait.slot)
            count = max(1, _MAX_ENTRIES // len(self.peer.routes))
            for first in range(0, len(waits), count):
                self.batches.append(WaitBatch.of_waits(waits[first : first + count]))
        self.batches.rotate(-1)
        return self.batches[-1]

    def is_recent(self, now_s: float) -> bool:
        """Whether what is known of the peer's steps is of use for waits that begin now."""
        return bool(self.waits) or self.schedule.is_recent(now_s)

    def add(self, wait: Wait) -> None:
        self.waits.add(wait)
        self.missing = max(self.missing, wait.missing)
        self.batches.clear()

    def remove(self, waits: list[Wait]) -> list[Wait]:
        """Remove those that are still waiting, and return them."""
        still_waiting = [wait for wait in waits if wait in self.waits]
        if still_waiting:
            self.waits.difference_update(still_waiting)
            self.missing = max((wait.missing for wait in self.waits), default=0)
            self.batches.clear()
        return still_waiting


class SlotWatch:
    """See the module. Used on the transfer thread.

    Attributes:
        closing: polls that failed, or that no load waits for any more, and that may still write into their entries.
    """

    def __init__(self, reader: FabricReader, slot_reads: SlotReads) -> None:
        self.closing: list[SlotPoll] = []
        self._reader = reader
        self._slot_reads = slot_reads
        self._watched: dict[Peer, _WatchedPeer] = {}

    def add(self, wait: Wait, now_s: float) -> None:
        """Begin to wait. The peer has at least one route."""
        watched = self._watched.get(wait.peer)
        # After a pause of the producer its former steps say nothing about the next one.
        if watched is None or not watched.is_recent(now_s):
            watched = _WatchedPeer(
                wait.peer, PollSchedule(changed_s=now_s, due_s=now_s)
            )
            self._watched[wait.peer] = watched
        elif not watched.waits:
            watched.schedule.begin(now_s)
        watched.add(wait)
        watched.schedule.add_wait(now_s, watched.missing)

    def remove(self, wait: Wait) -> None:
        """End a wait; one that is over already may be removed too."""
        watched = self._watched.get(wait.peer)
        # With the last wait its poll is closed, not forgotten: it may still write into its entries.
        if watched is not None and watched.remove([wait]) and not watched.waits:
            self._close(watched)

    def polls(self) -> Iterator[SlotPoll]:
        """All polls that may still write."""
        for watched in self._watched.values():
            if watched.poll is not None:
                yield watched.poll
        yield from self.closing

    def busy(self) -> bool:
        """Whether a poll is in flight that loads wait for."""
        return any(watched.poll is not None for watched in self._watched.values())

    def next_s(self) -> float | None:
        """When the next poll is due; None without waits."""
        due_s = (
            watched.schedule.due_s
            for watched in self._watched.values()
            if watched.waits
        )
        return min(due_s, default=None)

    def step(self, now_s: float) -> tuple[list[Wait], bool]:
        """Begin the polls that are due, and end those that have ended.

        Returns:
            The waits that are over, and whether any poll began or ended.
        """
        over: list[Wait] = []
        has_moved = False
        for watched in list(self._watched.values()):
            poll_before = watched.poll
            try:
                over += self._advance(watched, now_s)
            except Exception as error:  # noqa: BLE001 - given to the loads, which show it
                over += self._fail(watched, error)
            has_moved |= watched.poll is not poll_before
            if not watched.waits:
                self._close(watched)
            if not watched.is_recent(now_s):
                del self._watched[watched.peer]
        self.closing = [poll for poll in self.closing if not self._try_close(poll)]
        return over, has_moved

    def _advance(self, watched: _WatchedPeer, now_s: float) -> list[Wait]:
        """Begin a poll that is due, or end one that has ended. Returns the waits that are over."""
        if watched.poll is None and watched.waits and now_s >= watched.schedule.due_s:
            self._begin(watched, now_s)
        poll = watched.poll
        if poll is None or self._is_in_flight(poll):
            return []
        words = poll.read.values()
        self._close(watched)
        over = poll.batch.end_waits(words, poll.begun_s)
        new_tokens = sum(wait.new_tokens for wait in over)
        over = watched.remove(over)
        if over:
            watched.schedule.changed(now_s, new_tokens)
        watched.schedule.polled(poll.begun_s, now_s, watched.missing)
        return over

    def _is_in_flight(self, poll: SlotPoll) -> bool:
        states = [
            self._reader.fabric.poll(transfer) for transfer in poll.read.transfers
        ]
        return TransferState.IN_FLIGHT in states

    def _begin(self, watched: _WatchedPeer, now_s: float) -> None:
        """Post a poll, unless there are too few entries now."""
        batch = watched.next_batch()
        sources = [route.slots for route in watched.peer.routes]
        # The words of a process that has died never change, and if it is mapped no read over the fabric would tell.
        if watched.peer.has_exited():
            raise PeerLost("poll slots", "its process has ended", str(watched.peer.key))
        count = entries_needed(sources, len(batch.waits))
        taken = self._slot_reads.try_take(count, str(watched.peer.key))
        if taken is None:
            watched.schedule.put_off(now_s)
            return
        # Entries in order: NIXL merges neighbours into one descriptor.
        entries = tuple(sorted(taken))
        poll = SlotPoll(
            peer=watched.peer,
            batch=batch,
            read=EntryRead(sources, batch.slots, self._slot_reads, entries),
            reads=self._reader.reads(),
            begun_s=now_s,
        )
        watched.poll = poll
        poll.read.post(poll.reads)

    def _fail(self, watched: _WatchedPeer, error: Exception) -> list[Wait]:
        """A poll has failed: so have all waits for this peer."""
        if not isinstance(error, FabricError):
            internal_errors.log(f"peer={watched.peer.key}: its slots cannot be read")
        self._close(watched)
        over = watched.remove(list(watched.waits))
        for wait in over:
            wait.error = error
        return over

    def _close(self, watched: _WatchedPeer) -> None:
        """Give the entries of the poll back, now or when nothing can write into them any more."""
        poll = watched.poll
        watched.poll = None
        if poll is not None and not self._try_close(poll):
            self.closing.append(poll)

    def _try_close(self, poll: SlotPoll) -> bool:
        if not poll.settle():
            return False
        self._slot_reads.give_back(poll.entries, str(poll.peer.key))
        return True
