"""A remote prompt's states. The table is the whole truth; `ledger.py` only carries it out.

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
    """Where a remote prompt is on its way."""

    OFFERED = "offered"
    """The request waits; its blocks are held on the producer."""
    LOADING = "loading"
    """The workers read into blocks that this engine keeps for it."""
    LOADED = "loaded"
    FAILED = "failed"
    DECLINED = "declined"
    """Nothing needed to be loaded: the prompt was in the local cache."""
    ABORTED = "aborted"
    """The request is gone, the workers still read: the blocks stay until they report."""


class LoadEvent(TableEnum):
    """What can happen to a remote prompt."""

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
        # vLLM announces every later allocation too; there is nothing to load then.
        **{(state, LoadEvent.DECLINE): state for state in _OVER},
        **{(state, LoadEvent.FINISH): None for state in _OVER},
    }
)
