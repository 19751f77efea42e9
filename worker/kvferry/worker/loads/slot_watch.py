"""The slots that loads wait for, read together: one read from each producer worker serves all loads from it.

A load that waits has nothing in flight and holds no entries: the watch's reads have entries of their own. They begin by
a schedule for each producer:

    step ends        quiet: three quarters of the time that a step takes          step ends
    ────┬──────────────────────────────────────────────────────────┬──┬──┬──┬──┬──────┬────→
        changed                                                    polls, 1 to 5 ms   changed

Polls begin 1 ms apart and, while no slot of the producer changes, a twentieth of the time since the last change, 5 ms
at most. None begins in the first three quarters of the time that the producer's next step takes, if the two before were
as long: 50 ms at most, and less by as much as fewer tokens are missing than the last step has computed.

The quiet time is worth its rules: each poll takes the interpreter's lock, for which the engine's step waits, and
without them 0.92 requests/s were served in place of 0.97.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.ids import Epoch
from kvferry.protocol.slots import SlotState, progress_of, slot_word
from kvferry.worker.fabric.errors import FabricError, PeerLost, internal_errors
from kvferry.worker.fabric.port import TransferState
from kvferry.worker.fabric.reads import (
    EntryRead,
    FabricReader,
    Reads,
    SlotReads,
    SlotWords,
    entries_needed,
)
from kvferry.worker.peers.peer import Peer


def complete_tokens(words: SlotWords, epoch: Epoch, num_tokens: int) -> int | None:
    """The leading tokens of a prompt that are complete on every producer worker.

    All of them are where its slot is READY. None if the slot of any worker is not under this epoch.
    """
    ready = slot_word(epoch, SlotState.READY)
    computing = slot_word(epoch, SlotState.COMPUTING)
    # The least of all workers: a part of the prompt is complete when each of them has finished it.
    complete = num_tokens
    for state, progress in words:
        if state == computing:
            complete = min(complete, progress_of(progress, epoch))
        elif state != ready:
            return None
    return complete


@dataclass(slots=True, eq=False)
class Wait:
    """The wait of one load for a change of its slot.

    Attributes:
        words: as the load has read them; when the wait is over, as they are now.
        epoch: that the load follows.
        num_tokens: of the whole prompt.
        until_s: a poll that begins at this time or later ends the wait, whatever it reads.
        read_s: when the poll began that has ended the wait.
        error: why the peer cannot be read from; None while it can.
        missing: tokens of the prompt that were not complete when the wait began.
    """

    peer: Peer
    slot: int
    words: SlotWords
    epoch: Epoch
    num_tokens: int
    until_s: float = math.inf
    read_s: float = -math.inf
    error: Exception | None = None
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        # Once: the schedule asks for it at every change of any slot, for all waits.
        self.missing = self.num_tokens - self.complete

    @property
    def complete(self) -> int:
        """The leading tokens of the prompt that are complete by `words`."""
        return complete_tokens(self.words, self.epoch, self.num_tokens) or 0

    @property
    def new_tokens(self) -> int:
        """The tokens that have become complete since the wait began."""
        complete_before = self.num_tokens - self.missing
        return self.complete - complete_before


LoadSteps = Generator[Wait | None, None, None]
"""The steps of a load: None where it wants to be resumed soon, a `Wait` where it is parked until that is over."""


@dataclass(slots=True, eq=False)
class WaitBatch:
    """Waits for one peer that one poll serves, as arrays: a thousand waits are compared in one operation.

    Attributes:
        slots: int32 `[waits]`.
        seen: the words that the loads know, uint64 `[waits, routes, 2]`.
        until_s: float64 `[waits]`.
    """

    waits: list[Wait]
    slots: NDArray[np.int32]
    seen: NDArray[np.uint64]
    until_s: NDArray[np.float64]

    @classmethod
    def of_waits(cls, waits: list[Wait]) -> WaitBatch:
        return cls(
            waits=waits,
            slots=np.array([wait.slot for wait in waits], dtype=np.int32),
            seen=np.array([wait.words for wait in waits], dtype=np.uint64),
            until_s=np.array([wait.until_s for wait in waits]),
        )

    def end_waits(self, words: NDArray[np.uint64], begun_s: float) -> list[Wait]:
        """Compare the words with those that the loads know.

        Args:
            words: as read by the poll, uint64 `[waits, routes, 2]`.
            begun_s: when the poll began.

        Returns:
            The waits that are over, each with its words.
        """
        has_changed = (words != self.seen).any(axis=(1, 2))
        is_over = has_changed | (self.until_s <= begun_s)
        over: list[Wait] = []
        for index in np.flatnonzero(is_over).tolist():
            wait = self.waits[index]
            wait.words = tuple(
                (state, progress) for state, progress in words[index].tolist()
            )
            wait.read_s = begun_s
            over.append(wait)
        return over


@dataclass(slots=True, eq=False)
class SlotPoll:
    """One read of slots from every worker of a peer.

    Attributes:
        reads: settle what `read` has posted.
    """

    peer: Peer
    batch: WaitBatch
    read: EntryRead
    reads: Reads
    begun_s: float

    @property
    def entries(self) -> tuple[int, ...]:
        """The entries that it holds: none for workers that are mapped."""
        return self.read.entries

    def settle(self) -> bool:
        """Whether nothing is written into the entries any more; raises nothing."""
        return self.reads.settle()


_MIN_PAUSE_S = 1e-3
_MAX_PAUSE_S = 5e-3
_PAUSE_SHARE = 1 / 20
_QUIET_SHARE = 0.75
_MAX_QUIET_S = 50e-3


@dataclass(slots=True)
class PollSchedule:
    """The schedule of the polls of one producer's slots.

    Attributes:
        changed_s: the last change of a slot, or the first wait.
        due_s: when the next poll is due.
        stepped_s: when a change last reported tokens: a step of the producer has ended.
        gaps_s: the times between the last three of them.
        step_tokens: the tokens of the last one.
    """

    changed_s: float
    due_s: float
    stepped_s: float = -math.inf
    gaps_s: tuple[float, float] = (0.0, 0.0)
    step_tokens: int = 1

    def begin(self, now_s: float) -> None:
        """The first wait begins while none is left; what is known of the producer's steps stays."""
        self.changed_s = now_s
        self.due_s = math.inf

    def add_wait(self, now_s: float, missing: int) -> None:
        """A wait begins.

        Args:
            missing: most tokens that any wait lacks.
        """
        soon_s = max(now_s + _MIN_PAUSE_S, self.quiet_until_s(missing))
        self.due_s = min(self.due_s, soon_s)

    def put_off(self, now_s: float) -> None:
        """A poll that was due could not begin."""
        self.due_s = now_s + _MIN_PAUSE_S

    def changed(self, now_s: float, tokens: int) -> None:
        """Slots have changed, and report so many tokens more."""
        self.changed_s = now_s
        # Slots also change without a step: a lease ends, or goes on under another epoch.
        if tokens <= 0:
            return
        gap_s = 0.0
        if self.stepped_s > -math.inf:
            gap_s = now_s - self.stepped_s
        self.stepped_s = now_s
        self.gaps_s = (self.gaps_s[1], gap_s)
        self.step_tokens = tokens

    def polled(self, begun_s: float, now_s: float, missing: int) -> None:
        """A poll that began at `begun_s` has ended; its changes are in already."""
        pause_s = (now_s - self.changed_s) * _PAUSE_SHARE
        pause_s = min(max(pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
        self.due_s = max(begun_s + pause_s, self.quiet_until_s(missing))

    def quiet_until_s(self, missing: int) -> float:
        """When the next step can have ended, at the earliest."""
        # The shorter of the two gaps: steps of uneven length are polled as early as the short ones want.
        gap_s = min(self.gaps_s) * min(1.0, missing / self.step_tokens)
        return self.stepped_s + min(_QUIET_SHARE * gap_s, _MAX_QUIET_S)

    def is_recent(self, now_s: float) -> bool:
        """Whether waits that begin now are for the step after the last one; else the producer has been idle."""
        return now_s < self.stepped_s + _MAX_QUIET_S


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
        watched: peers that loads wait for, or have waited for a short time ago.
        closing: polls that failed, or that no load waits for any more, and that may still write into their entries.
    """

    def __init__(self, reader: FabricReader, slot_reads: SlotReads) -> None:
        self.closing: list[SlotPoll] = []
        self._reader = reader
        self._slot_reads = slot_reads
        self.watched: dict[Peer, _WatchedPeer] = {}

    def add(self, wait: Wait, now_s: float) -> None:
        """Begin to wait. The peer has at least one route."""
        watched = self.watched.get(wait.peer)
        # After a pause of the producer its former steps say nothing about the next one.
        if watched is None or not watched.is_recent(now_s):
            watched = _WatchedPeer(
                wait.peer, PollSchedule(changed_s=now_s, due_s=now_s)
            )
            self.watched[wait.peer] = watched
        elif not watched.waits:
            watched.schedule.begin(now_s)
        watched.add(wait)
        watched.schedule.add_wait(now_s, watched.missing)

    def remove(self, wait: Wait) -> None:
        """End a wait; one that is over already may be removed too."""
        watched = self.watched.get(wait.peer)
        # With the last wait its poll is closed, not forgotten: it may still write into its entries.
        if watched is not None and watched.remove([wait]) and not watched.waits:
            self._close(watched)

    def polls(self) -> Iterator[SlotPoll]:
        """All polls that may still write."""
        for watched in self.watched.values():
            if watched.poll is not None:
                yield watched.poll
        yield from self.closing

    def busy(self) -> bool:
        """Whether a poll is in flight that loads wait for."""
        return any(watched.poll is not None for watched in self.watched.values())

    def next_s(self) -> float | None:
        """When the next poll is due; None without waits."""
        due_s = (
            watched.schedule.due_s for watched in self.watched.values() if watched.waits
        )
        return min(due_s, default=None)

    def step(self, now_s: float) -> tuple[list[Wait], bool]:
        """Begin the polls that are due, and end those that have ended.

        Returns:
            The waits that are over, and whether any poll began or ended.
        """
        over: list[Wait] = []
        has_moved = False
        for watched in list(self.watched.values()):
            poll_before = watched.poll
            try:
                over += self._advance(watched, now_s)
            except Exception as error:  # noqa: BLE001 - given to the loads, which show it
                over += self._fail(watched, error)
            has_moved |= watched.poll is not poll_before
            if not watched.waits:
                self._close(watched)
            if not watched.is_recent(now_s):
                del self.watched[watched.peer]
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
        sources = watched.peer.slots
        # The words of a process that has died never change, and if it is mapped no read over the fabric would tell.
        if watched.peer.has_exited():
            raise PeerLost("poll slots", "its process has ended", str(watched.peer.key))
        count = entries_needed(sources, len(batch.waits))
        taken = self._slot_reads.try_take(count, watched.peer.key.address)
        if taken is None:
            watched.schedule.put_off(now_s)
            return
        # Entries in order: NIXL merges neighbours into one descriptor.
        entries = tuple(sorted(taken))
        poll = SlotPoll(
            peer=watched.peer,
            batch=batch,
            read=EntryRead(sources, batch.slots, self._slot_reads, entries),
            reads=Reads(self._reader),
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
        self._slot_reads.give_back(poll.entries, poll.peer.key.address)
        return True
