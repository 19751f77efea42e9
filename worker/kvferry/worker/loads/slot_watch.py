"""The slots that loads wait for, read together: one read from each producer worker fetches those of all its loads.

A load that waits has nothing in flight and holds no entries: the watch's reads have entries of their own. Looks begin
1 ms apart and, while no slot of the producer changes, a twentieth of the time since the last change, 5 ms at most. A
look takes the interpreter's lock, for which the engine's step waits. So none begins in the first three quarters of the
time that the producer's next step takes, if the two before were as long: 50 ms at most, and less by as much as fewer
tokens are missing than the last step has computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kvferry.protocol.ids import EMPTY, Epoch, SlotState, progress_of, slot_word
from kvferry.worker.fabric.entry_buffers import SlotReads
from kvferry.worker.fabric.errors import FabricError, internal_errors
from kvferry.worker.fabric.port import Transfer, TransferState
from kvferry.worker.fabric.reads import FabricReader, Reads
from kvferry.worker.peers.peer import Peer

SlotWords: TypeAlias = tuple[tuple[int, int], ...]
"""The two words of a slot on every producer worker that a load reads from, in the order of the peer's routes."""

_SHORTEST_S = 1e-3
_LONGEST_S = 5e-3
_SHARE = 20
_QUIET_SHARE = 0.75
_LONGEST_QUIET_S = 50e-3
_MOST_ENTRIES = 1024
"""Most entries of one look; the slots of more loads are looked at in turn."""


def complete_tokens(words: SlotWords, epoch: Epoch, num_tokens: int) -> int | None:
    """The leading tokens of a prompt that are complete on every producer worker, all of them where it is READY; None if
    the slot of any worker is not under this epoch."""
    ready, computing = (slot_word(epoch, state) for state in (SlotState.READY, SlotState.COMPUTING))
    least = num_tokens
    for state, progress in words:
        if state == computing:
            least = min(least, progress_of(progress, epoch))
        elif state != ready:
            return None
    return least


@dataclass(slots=True, eq=False)
class Wait:
    """The wait of one load for a change of its slot.

    Attributes:
        words: as the load has read them; when the wait is over, as they are now.
        epoch: that the load follows.
        num_tokens: of the whole prompt.
        until_s: a look that begins at this time or later ends the wait, whatever it finds.
        looked_s: when the look began that has ended the wait.
        error: why the peer cannot be read from; None while it can.
        missing: tokens of the prompt that were not complete when the wait began.
    """

    peer: Peer
    slot: int
    words: SlotWords
    epoch: Epoch
    num_tokens: int
    until_s: float = math.inf
    looked_s: float = -math.inf
    error: Exception | None = None
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.num_tokens - self.complete

    @property
    def complete(self) -> int:
        """The leading tokens of the prompt that are complete by `words`."""
        return complete_tokens(self.words, self.epoch, self.num_tokens) or 0


@dataclass(slots=True, eq=False)
class _Part:
    """Waits that one look serves: int32 `slots[waits]`, uint64 `seen[waits, routes, 2]`, float64 `until_s[waits]`."""

    waits: list[Wait]
    slots: np.ndarray
    seen: np.ndarray
    until_s: np.ndarray

    @classmethod
    def of(cls, waits: list[Wait]) -> _Part:
        slots = np.array([wait.slot for wait in waits], dtype=np.int32)
        seen = np.array([wait.words for wait in waits], dtype=np.uint64)
        return cls(waits, slots, seen, np.array([wait.until_s for wait in waits]))


@dataclass(slots=True, eq=False)
class SlotPoll:
    """One read of slots from every worker of a peer; `entries` are those of the first route, then of the next one."""

    peer: Peer
    part: _Part
    entries: tuple[int, ...]
    reads: Reads
    begun_s: float
    transfers: list[Transfer] = field(default_factory=list)

    def settle(self) -> bool:
        """Whether nothing is written into the entries any more; raises nothing."""
        return self.reads.settle()


@dataclass(slots=True, eq=False)
class _Watched:
    """One peer: the waits, the look in flight, and when the next one is due.

    Attributes:
        changed_s: the last change, or the first wait.
        stepped_s: when a change last reported tokens: a step of the producer has ended.
        gaps_s: times between the last three of them.
        step_tokens: the tokens of the last one.
        missing: most tokens that any wait lacks.
        parts: the waits by slot, as looks take them in turn; empty when they have to be divided again.
    """

    peer: Peer
    changed_s: float
    due_s: float
    stepped_s: float = -math.inf
    gaps_s: tuple[float, float] = (0.0, 0.0)
    step_tokens: int = 1
    missing: int = 0
    waits: set[Wait] = field(default_factory=set)
    parts: deque[_Part] = field(default_factory=deque)
    look: SlotPoll | None = None

    def next_part(self) -> _Part:
        if not self.parts:
            waits, most = (
                sorted(self.waits, key=lambda wait: wait.slot),
                max(1, _MOST_ENTRIES // len(self.peer.routes)),
            )
            self.parts.extend(
                _Part.of(waits[first : first + most]) for first in range(0, len(waits), most)
            )
        self.parts.rotate(-1)
        return self.parts[-1]

    def changed(self, now_s: float, tokens: int) -> None:
        """Slots have changed, and report so many tokens more."""
        self.changed_s = now_s
        if tokens > 0:
            gap_s = now_s - self.stepped_s if self.stepped_s > -math.inf else 0.0
            self.stepped_s, self.gaps_s, self.step_tokens = now_s, (self.gaps_s[1], gap_s), tokens

    @property
    def quiet_until_s(self) -> float:
        """When the next step can have ended, at the earliest."""
        gap_s = min(self.gaps_s) * min(1.0, self.missing / self.step_tokens)
        return self.stepped_s + min(_QUIET_SHARE * gap_s, _LONGEST_QUIET_S)

    def is_recent(self, now_s: float) -> bool:
        """Whether waits that begin now are for the step after the last one."""
        return bool(self.waits) or now_s < self.stepped_s + _LONGEST_QUIET_S

    def add(self, wait: Wait) -> None:
        self.waits.add(wait)
        self.missing = max(self.missing, wait.missing)
        self.parts.clear()

    def remove(self, waits: list[Wait]) -> list[Wait]:
        """Remove those that are still waiting, and return them."""
        found = [wait for wait in waits if wait in self.waits]
        self.waits.difference_update(found)
        if found:
            self.missing = max((wait.missing for wait in self.waits), default=0)
            self.parts.clear()
        return found


class SlotWatch:
    """See the module. Used on the transfer thread.

    Attributes:
        closing: looks that failed, or that no load waits for any more, and that may still write into their entries.
    """

    def __init__(self, reader: FabricReader, slot_reads: SlotReads) -> None:
        self.closing: list[SlotPoll] = []
        self._reader = reader
        self._slot_reads = slot_reads
        self._watched: dict[Peer, _Watched] = {}

    def add(self, wait: Wait, now_s: float) -> None:
        """Begin to wait. The peer has at least one route."""
        watched = self._watched.get(wait.peer)
        if watched is None or not watched.is_recent(now_s):
            watched = self._watched[wait.peer] = _Watched(wait.peer, now_s, now_s)
        elif not watched.waits:
            watched.changed_s, watched.due_s = now_s, math.inf
        watched.add(wait)
        watched.due_s = min(watched.due_s, max(now_s + _SHORTEST_S, watched.quiet_until_s))

    def remove(self, wait: Wait) -> None:
        """End a wait; one that is over already may be removed too."""
        watched = self._watched.get(wait.peer)
        if watched is not None and watched.remove([wait]) and not watched.waits:
            self._close(watched)

    def looks(self) -> Iterator[SlotPoll]:
        """All looks that may still write."""
        yield from (watched.look for watched in self._watched.values() if watched.look is not None)
        yield from self.closing

    def busy(self) -> bool:
        """Whether a look is in flight that loads wait for."""
        return any(watched.look is not None for watched in self._watched.values())

    def next_s(self) -> float | None:
        """When the next look is due; None without waits."""
        return min(
            (watched.due_s for watched in self._watched.values() if watched.waits), default=None
        )

    def step(self, now_s: float) -> tuple[list[Wait], bool]:
        """Begin the looks that are due, and end those that have ended.

        Returns:
            The waits that are over, and whether any look began or ended.
        """
        over: list[Wait] = []
        moved = False
        for watched in list(self._watched.values()):
            before = watched.look
            try:
                over += self._advance(watched, now_s)
            except Exception as error:  # noqa: BLE001 - given to the loads, which show it
                over += self._fail(watched, error)
            moved |= watched.look is not before
            if not watched.waits:
                self._close(watched)
            if not watched.is_recent(now_s):
                del self._watched[watched.peer]
        self.closing = [look for look in self.closing if not self._try_close(look)]
        return over, moved

    def _advance(self, watched: _Watched, now_s: float) -> list[Wait]:
        if watched.look is None and watched.waits and now_s >= watched.due_s:
            self._begin(watched, now_s)
        look = watched.look
        if look is None or TransferState.IN_FLIGHT in [
            self._reader.fabric.poll(one) for one in look.transfers
        ]:
            return []
        part, shape = look.part, (len(watched.peer.routes), len(look.part.waits), 2)
        found = self._slot_reads.memory[list(look.entries)].reshape(shape).swapaxes(0, 1)
        is_over = (found != part.seen).any(axis=(1, 2)) | (part.until_s <= look.begun_s)
        self._close(watched)
        over, tokens = [], 0
        for index in np.flatnonzero(is_over).tolist():
            wait = part.waits[index]
            wait.words = tuple((state, progress) for state, progress in found[index].tolist())
            wait.looked_s = look.begun_s
            tokens += wait.complete - (wait.num_tokens - wait.missing)
            over.append(wait)
        over = watched.remove(over)
        if over:
            watched.changed(now_s, tokens)
        pause_s = min(max((now_s - watched.changed_s) / _SHARE, _SHORTEST_S), _LONGEST_S)
        watched.due_s = max(look.begun_s + pause_s, watched.quiet_until_s)
        return over

    def _begin(self, watched: _Watched, now_s: float) -> None:
        """Post a look, unless there are too few entries now."""
        part, routes = watched.next_part(), watched.peer.routes
        count = len(part.waits)
        taken = self._slot_reads.try_take(count * len(routes), str(watched.peer.key))
        if taken is None:
            watched.due_s = now_s + _SHORTEST_S
            return
        look = watched.look = SlotPoll(
            watched.peer, part, tuple(sorted(taken)), self._reader.reads(), now_s
        )
        entries = np.array(look.entries, dtype=np.int32)
        self._slot_reads.memory[entries] = EMPTY
        for index, route in enumerate(routes):
            local = entries[index * count : (index + 1) * count]
            look.transfers.append(
                look.reads.post(self._slot_reads.descriptors, local, route.slots, part.slots)
            )

    def _fail(self, watched: _Watched, error: Exception) -> list[Wait]:
        """A look has failed: so have all waits for this peer."""
        if not isinstance(error, FabricError):
            internal_errors.log(f"peer={watched.peer.key}: its slots cannot be read")
        self._close(watched)
        over = watched.remove(list(watched.waits))
        for wait in over:
            wait.error = error
        return over

    def _close(self, watched: _Watched) -> None:
        look, watched.look = watched.look, None
        if look is not None and not self._try_close(look):
            self.closing.append(look)

    def _try_close(self, look: SlotPoll) -> bool:
        if not look.settle():
            return False
        self._slot_reads.give_back(look.entries, str(look.peer.key))
        return True
