"""How a handover ended, in words, and which of its parts were not recorded."""

from __future__ import annotations

from kvferry.trace.events import (
    DecodeArrived,
    DecodeScheduled,
    Finished,
    LeaseOver,
    LoadOrdered,
    LoadReported,
    ParamsGiven,
    Recomputed,
)
from kvferry.trace.handover import Handover

LOADED = "loaded"
NOTHING_TO_LOAD = "nothing to load"
GOOD = frozenset({LOADED, NOTHING_TO_LOAD})
"""Outcomes after which the consumer had the prompt without computing it."""

# `LeaseOver.how` of leases that a consumer ended.
_FETCHED = frozenset({"done", "release"})


def outcome_of(handover: Handover) -> str:
    """One of `GOOD`, or a text that says how far it came, and why no further."""
    if handover.decode or handover.loads:
        return _consumer_outcome(handover)
    if not handover.get(ParamsGiven):
        return "not prefilled"
    over = handover.get(LeaseOver)
    if over is None:
        return "not fetched so far"
    if over.how in _FETCHED:
        return f"fetched: {over.how}"
    return f"not fetched: {over.how}"


def _consumer_outcome(handover: Handover) -> str:
    reasons = sorted({load.reason for load in handover.loads.values()} - {""})
    why = f" ({', '.join(reasons)})" if reasons else ""
    recomputed = handover.get(Recomputed)
    if recomputed is not None:
        # The scheduler's reason is often that of the workers: then it is said once.
        if reasons == [recomputed.reason]:
            why = ""
        return f"recomputed: {recomputed.reason}{why}"
    reported = handover.get(LoadReported)
    if reported is not None:
        return LOADED if reported.good else f"load failed{why}"
    if handover.get(DecodeScheduled) and not handover.get(LoadOrdered):
        return NOTHING_TO_LOAD
    if handover.get(Finished):
        return f"ended before it was loaded{why}"
    return f"under way{why}"


def missing_parts(handover: Handover) -> tuple[str, ...]:
    """Names of the parts that have recorded nothing of it, although they took part."""
    missing = []
    if not handover.prefill:
        missing.append("producer")
    if not (handover.decode or handover.loads):
        # A lease that a consumer has ended shows that there was one.
        over = handover.get(LeaseOver)
        if over is not None and over.how in _FETCHED:
            missing.append("consumer")
        return tuple(missing)
    if not any(handover.get(kind) for kind in (DecodeArrived, LoadOrdered, Recomputed)):
        missing.append("consumer's scheduler")
    if handover.get(LoadReported) and not handover.loads:
        missing.append("consumer's workers")
    return tuple(missing)
