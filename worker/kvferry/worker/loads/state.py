"""The states of a load on the transfer thread: the transition table, which `LoadsByState` executes, and a load's story.

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
from kvferry.worker.loads.record import LoadRecord

_STORY_EVENTS = 12
"""Transitions that a story keeps: a streamed load is parked once a step of its producer, hundreds of times in all."""


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


class LoadStory:
    """The last events of one load and their times, for error texts and the log.

    The ends of stages are taken from the record when the story is told, so they cost nothing while the load runs.
    """

    __slots__ = ("_events", "_forgotten", "_record")

    def __init__(self, record: LoadRecord) -> None:
        self._record = record
        self._events: list[tuple[LoadEvent, float]] = []
        self._forgotten = 0

    def add(self, event: LoadEvent, now_s: float) -> None:
        """An event has happened now, by the record's clock."""
        if len(self._events) == _STORY_EVENTS:
            del self._events[0]
            self._forgotten += 1
        self._events.append((event, now_s))

    def __str__(self) -> str:
        """For example `begin 0.1 ms, connecting ended 0.2 ms, park 0.9 ms, failed 60001.0 ms`, since the order."""
        ended_s = self._record.ended_s
        events = [(at_s, f"{stage.value} ended") for stage, at_s in ended_s.items()]
        events += [(at_s, event.value) for event, at_s in self._events]
        # By time alone: a stage that ends with a transition stands before it.
        events.sort(key=lambda event: event[0])
        parts = [
            f"{text} {(at_s - self._record.ordered_s) * 1e3:.1f} ms"
            for at_s, text in events
        ]
        if self._forgotten:
            parts.insert(0, f"{self._forgotten} earlier events")
        return ", ".join(parts) or "no event since its order"
