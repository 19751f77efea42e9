"""A remote prompt: its transition table, which `ledger.py` executes, and its record.

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

from dataclasses import dataclass

from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.consumer.remote_lease import RemoteLease
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


IN_FLIGHT = (LoadState.LOADING, LoadState.ABORTED)
"""States in which workers read."""
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


@dataclass(slots=True)
class RemotePrompt:
    """One request whose prompt, or the beginning of it, is in the cache of another engine.

    Attributes:
        is_turn: the source is the answer to the conversation's last turn, and the rest is computed here.
        shared_tokens: leading tokens of this prompt that the producer's blocks certainly hold.
        local_tokens: the local prefix hit of the last call of `matched_tokens`.
    """

    request_id: str
    source: RemotePrefill
    lease: RemoteLease
    shared_tokens: int
    offered_s: float
    is_turn: bool = False
    state: LoadState = LoadState.OFFERED
    local_tokens: int = 0

    def __str__(self) -> str:
        return f"req={self.request_id}"
