"""The state of a load on the transfer thread: the transition table, which `LoadsByState` executes, and its deadlines.

               begin              park                  resume
    ─→ WAITING ──────→ RUNNING ──────────→ PARKED ────────────────→ RESUMED
                       │     ↑                                         │
                loaded │     └──────────────────── begin ──────────────┘
                       ↓
                    FLUSHING ─── settled ───→ OVER ←─── settled ─── QUARANTINED
                                                                        ↑
              WAITING, RUNNING, PARKED, RESUMED ─────────── failed ─────┘

Only RUNNING loads are resumed, and only they take a place of `max_loads`. A load is reported when it leaves the states
in which it may fail; from then on only its transfers are watched.

A load has failed when it makes no progress, or takes too long. It has progressed when it is in another stage, when its
slot has changed, when one of its reads or waves has ended, or when the queue that it stands in has moved:

| it waits for | it has progressed when |
| --- | --- |
| a place among the loads that run, or the end of a handshake | always: what it waits for has a deadline of its own |
| entries, pages or its first wave of the pool | another load has given some back |
| a read | the read has ended; or one that was posted before it, from the same producer, and shares its link |
| its producer | its slot has changed; or as for a read, since a poll of the slot waits behind them |
| the device | the device has reached the mark |

Nothing of that may go on for ever: a producer can change its slot now and then for days. So each load also has a
deadline that no progress moves: `LONGEST` times the time without progress, from its order.

Both count the time that this process was awake (`AwakeClock`), and are judged after the load was resumed: a read that
has ended during a pause is seen before its deadline is.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.transitions import TableEnum


class LoadState(TableEnum):
    """States of a load on the transfer thread."""

    WAITING = "waiting"
    """It has not begun: all places of `max_loads` are taken."""
    RUNNING = "running"
    """It has a place, and is resumed in every round."""
    PARKED = "parked"
    """It waits for its producer without a place: nothing of it is in flight."""
    RESUMED = "resumed"
    """Its slot has changed; it waits for a place."""
    FLUSHING = "flushing"
    """It is good and reported; the reads behind its last messages are in flight."""
    QUARANTINED = "quarantined"
    """It has failed and is reported; its reads may still write."""
    OVER = "over"
    """Nothing of it is in flight any more."""


class LoadEvent(TableEnum):
    """Events of a load on the transfer thread."""

    BEGIN = "begin"
    PARK = "park"
    RESUME = "resume"
    LOADED = "loaded"
    FAILED = "failed"
    SETTLED = "settled"


MAY_FAIL = (LoadState.WAITING, LoadState.RUNNING, LoadState.PARKED, LoadState.RESUMED)
"""The states of loads that have not been reported."""

# Every failed load passes through QUARANTINED, also one that has nothing in flight and leaves it in the same turn: so
# no path gives the blocks back before `Load.settle` has said that nothing can write into them.
LOAD_TRANSITIONS: dict[tuple[LoadState, LoadEvent], LoadState] = {
    (LoadState.WAITING, LoadEvent.BEGIN): LoadState.RUNNING,
    (LoadState.RESUMED, LoadEvent.BEGIN): LoadState.RUNNING,
    (LoadState.RUNNING, LoadEvent.PARK): LoadState.PARKED,
    (LoadState.PARKED, LoadEvent.RESUME): LoadState.RESUMED,
    (LoadState.RUNNING, LoadEvent.LOADED): LoadState.FLUSHING,
    **{(state, LoadEvent.FAILED): LoadState.QUARANTINED for state in MAY_FAIL},
    (LoadState.FLUSHING, LoadEvent.SETTLED): LoadState.OVER,
    (LoadState.QUARANTINED, LoadEvent.SETTLED): LoadState.OVER,
}


class LoadFailed(KvferryError):
    """A load has failed: the contents of its blocks must not be used."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


# Generous, since all progress counts: 10 was tried first, and a staged load of a hundred slow waves would have missed
# it.
LONGEST = 20
"""The longest load, in times without progress: 20 minutes where `load_timeout_s` is 60."""


@dataclass(slots=True)
class Progress:
    """The progress of one load, as far as its parts note it themselves.

    Attributes:
        changes: the changes of its slot, and the parts of a prompt that it has read.
        turn: how many of the peer's data reads must have ended before what it waits for, by `ReadQueue.ended`.
    """

    changes: int = 0
    turn: int = 0


@dataclass(slots=True)
class Deadline:
    """The two deadlines of one load; all times are of one clock.

    Attributes:
        ordered_s: when the load was ordered.
        progressed_s: when it has progressed last, or until when it could not, through no fault of its own.
        noted: its progress as it was last taken.
    """

    ordered_s: float
    progressed_s: float
    noted: Hashable = None

    def note(self, progress: Hashable, now_s: float) -> None:
        """Take the load's progress: if there was any since the last call, the time without begins anew."""
        if progress != self.noted:
            self.noted = progress
            self.progressed_s = now_s

    def missed(self, now_s: float, timeout_s: float) -> str | None:
        """Why the load has failed, if it may go without progress for `timeout_s`; None while it has not."""
        if now_s - self.progressed_s > timeout_s:
            return f"no progress for {timeout_s:g} s"
        return self.longest_missed(now_s, timeout_s)

    def longest_missed(self, now_s: float, timeout_s: float) -> str | None:
        """Why the load has failed, whatever its progress; None while it has not."""
        if now_s - self.ordered_s > LONGEST * timeout_s:
            return f"not over {LONGEST * timeout_s:g} s after its order"
        return None
