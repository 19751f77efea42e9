"""The states of a remote prompt and its transition table, which `ledger.py` executes.

      offer               load                loaded
    ───────→ OFFERED ───────────→ LOADING ─────────────→ LOADED ─┐
                │ decline            │ failed                    │
                ├──────→ DECLINED ─┐ ├───────→ FAILED ───────────┤ finish
                │ finish           │ │ finish                    ↓
                └───────→ (gone) ←─┘ └───────→ ABORTED ──────→ (gone)
                                                 loaded, failed

A request that is LOADED, FAILED or DECLINED is never loaded again: after a preemption or a failure it is computed
here.
"""

from __future__ import annotations

from kvferry.scheduler.state.transitions import TableEnum, TransitionTable


class LoadState(TableEnum):
    """States of a remote prompt."""

    OFFERED = "offered"
    """The request waits; its blocks are held by the producer."""
    LOADING = "loading"
    """The workers read into blocks that are allocated for the request."""
    LOADED = "loaded"
    FAILED = "failed"
    DECLINED = "declined"
    """Nothing is loaded: the prompt was in the local cache, or is computed here."""
    ABORTED = "aborted"
    """The request is gone while workers still read: its blocks stay allocated until they report."""


class LoadEvent(TableEnum):
    """Events of a remote prompt."""

    LOAD = "load"
    DECLINE = "decline"
    LOADED = "loaded"
    FAILED = "failed"
    FINISH = "finish"


_OVER = (LoadState.LOADED, LoadState.FAILED, LoadState.DECLINED)

LOAD_TRANSITIONS: TransitionTable[LoadState, LoadEvent] = TransitionTable(
    {
        (LoadState.OFFERED, LoadEvent.LOAD): LoadState.LOADING,
        (LoadState.OFFERED, LoadEvent.DECLINE): LoadState.DECLINED,
        (LoadState.OFFERED, LoadEvent.FINISH): None,
        (LoadState.LOADING, LoadEvent.LOADED): LoadState.LOADED,
        (LoadState.LOADING, LoadEvent.FAILED): LoadState.FAILED,
        (LoadState.LOADING, LoadEvent.FINISH): LoadState.ABORTED,
        (LoadState.ABORTED, LoadEvent.LOADED): None,
        (LoadState.ABORTED, LoadEvent.FAILED): None,
        # vLLM reports every later allocation too; there is nothing to load then.
        **{(state, LoadEvent.DECLINE): state for state in _OVER},
        **{(state, LoadEvent.FINISH): None for state in _OVER},
    }
)
