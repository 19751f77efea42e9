"""A remote prompt and its lease: the transition table, which `ledger.py` executes, and the records.

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

import enum
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.link.commands import LeaseKey, RemoteLease
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.transitions import TableEnum

MAX_ENDED_LEASES = 1 << 16
"""Most leases remembered: at most 26 MB. A replay of an older one is tried, and fails at the producer's fence."""


class EndedLeases:
    """The last `limit` leases that ended, to recognise a replay of old params; the oldest is dropped first.

    A lease serves one request once. A later request with the same params is computed here at once, without a read that
    the producer's fence would refuse.
    """

    def __init__(self, limit: int = MAX_ENDED_LEASES) -> None:
        self._limit = limit
        self._keys: OrderedDict[LeaseKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: LeaseKey) -> bool:
        return key in self._keys

    def add(self, key: LeaseKey) -> None:
        """Remember a lease; adding it again does not change its age."""
        self._keys.setdefault(key)
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)


class PromptKind(enum.Enum):
    """What is read of another engine."""

    HANDOVER = "handover"
    """A whole prompt, to be decoded here."""
    TURN = "turn"
    """The answer to the conversation's last turn, and its prompt; the rest is computed here."""
    PREFIX = "prefix"
    """The first part of a prompt, which that engine has for requests of its own; the rest is computed here."""


class RemotePromptState(TableEnum):
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
    """The request is gone and its load cancelled: its blocks stay allocated until the workers have reported that."""


class RemotePromptEvent(TableEnum):
    """Events of a remote prompt."""

    LOAD = "load"
    DECLINE = "decline"
    LOADED = "loaded"
    FAILED = "failed"
    FINISH = "finish"


IN_FLIGHT = (RemotePromptState.LOADING, RemotePromptState.ABORTED)
"""States in which workers read."""
CLAIMING = (RemotePromptState.OFFERED, *IN_FLIGHT)
"""States in which a request has a claim on its lease."""
_OVER = (RemotePromptState.LOADED, RemotePromptState.FAILED, RemotePromptState.DECLINED)

# LOADING ends through the workers' report alone, also when the request is gone: until then a read may write into its
# blocks, and vLLM keeps them.
REMOTE_PROMPT_TRANSITIONS: dict[
    tuple[RemotePromptState, RemotePromptEvent], RemotePromptState | None
] = {
    (RemotePromptState.OFFERED, RemotePromptEvent.LOAD): RemotePromptState.LOADING,
    (RemotePromptState.OFFERED, RemotePromptEvent.DECLINE): RemotePromptState.DECLINED,
    (RemotePromptState.OFFERED, RemotePromptEvent.FINISH): None,
    (RemotePromptState.LOADING, RemotePromptEvent.LOADED): RemotePromptState.LOADED,
    (RemotePromptState.LOADING, RemotePromptEvent.FAILED): RemotePromptState.FAILED,
    (RemotePromptState.LOADING, RemotePromptEvent.FINISH): RemotePromptState.ABORTED,
    (RemotePromptState.ABORTED, RemotePromptEvent.LOADED): None,
    (RemotePromptState.ABORTED, RemotePromptEvent.FAILED): None,
    # vLLM reports every later allocation too; there is nothing to load then.
    **{(state, RemotePromptEvent.DECLINE): state for state in _OVER},
    **{(state, RemotePromptEvent.FINISH): None for state in _OVER},
}


@dataclass(slots=True)
class RemotePrompt:
    """One request whose prompt, or the beginning of it, is in the cache of another engine.

    Attributes:
        source: the params that name it.
        offered_s: when it arrived, on a monotonic clock.
        min_tokens: fewer missing tokens are computed instead.
        shared_tokens: leading tokens of this prompt that the producer's blocks certainly hold.
        local_tokens: the local prefix hit of the last call of `matched_tokens`.
        loading_tokens: those that were ordered to be loaded.
        ordered_s: when, on a monotonic clock; 0 before that.
    """

    request_id: str
    source: RemotePrefill
    lease: RemoteLease
    shared_tokens: int
    offered_s: float
    kind: PromptKind = PromptKind.HANDOVER
    min_tokens: int = 0
    state: RemotePromptState = RemotePromptState.OFFERED
    local_tokens: int = 0
    loading_tokens: int = 0
    ordered_s: float = 0.0

    @property
    def is_too_short(self) -> bool:
        """True if it has fewer tokens that are missing here than are worth a load."""
        return self.shared_tokens - self.local_tokens < self.min_tokens

    def __str__(self) -> str:
        return f"req={self.request_id}"
