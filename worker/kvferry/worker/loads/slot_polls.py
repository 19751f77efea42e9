"""What a load waits for while its producer computes, and the reads of slots that serve many such waits at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.ids import Epoch, SlotState, progress_of, slot_word
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.loads.entry_reads import EntryRead
from kvferry.worker.peers.peer import Peer

SlotWords: TypeAlias = tuple[tuple[int, int], ...]
"""The two words of a slot on every producer worker that a load reads from, in the order of the peer's routes."""


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
