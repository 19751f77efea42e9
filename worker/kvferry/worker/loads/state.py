"""The states of a load on the transfer thread: the transition table, which `LoadsByState` executes.

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
"""

from __future__ import annotations

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
