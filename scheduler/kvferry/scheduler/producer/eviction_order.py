"""Which held leases are evicted when blocks are needed, in what order, and how many.

Until a consumer renews a lease it is unknown whether it will be read. So offers of turns that no prefill waits with go
first, then prompts that no consumer has renewed although it would have by now. Leases that may still be wanted go only
when the shortage has lasted for a heartbeat: before that, consumers that are slower than this engine make it wait,
which costs nothing, while every lease that is ended unread costs a prefill.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.scheduler.producer.block_references import BlockReferences
from kvferry.scheduler.producer.lease import Lease, LeaseUse


class Rank(enum.IntEnum):
    """The order of eviction; within a rank the longest held goes first."""

    IDLE_TURN = 0
    """An offer that no prefill waits with."""
    DESERTED_PROMPT = 1
    """Held for two heartbeats, and no consumer has renewed it."""
    FRESH_PROMPT = 2
    """Not renewed, but too young to tell."""
    CLAIMED_TURN = 3
    CLAIMED_PROMPT = 4
    """A consumer has renewed it within a lease's time."""


Candidate = tuple[Rank, Lease]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is wanted of the leases.

    Attributes:
        free: blocks in the pool, or on their way back into it.
        need: blocks that must be free for a request that waits.
        reserve: blocks that turns leave free besides.
        cap: most blocks that leases alone may keep.
        slots_short: whether turns take slots that other leases will want.
        lasts: whether `need` or `cap` has been missed for a heartbeat.
    """

    free: int
    need: int = 0
    reserve: int = 0
    cap: int = 1 << 62
    slots_short: bool = False
    lasts: bool = False


class Stall:
    """Time during which requests wait and vLLM admits none, whatever is counted as free.

    Each heartbeat of it counts as a lack of twice as many blocks as the one before, the first as a lack of one. So a
    wrong estimate starves no request, and few leases end for a request that waits for something else than blocks.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._blocks = 1

    def end(self) -> None:
        """A request was admitted, or has ended."""
        self._since_s, self._blocks = None, 1

    def is_due(self, clock_s: float, heartbeat_s: float) -> bool:
        """Whether another heartbeat has passed. Begins the time if it has not begun; call it while requests wait."""
        if self._since_s is None:
            self._since_s = clock_s
        if clock_s < self._since_s + heartbeat_s:
            return False
        self._since_s = clock_s
        return True

    def take(self) -> int:
        """Blocks that are lacking; twice as many the next time."""
        blocks, self._blocks = self._blocks, 2 * self._blocks
        return blocks


def rank_of(lease: Lease, clock_s: float, heartbeat_s: float) -> Rank | None:
    """Where a held lease stands; None for a prompt that must not be evicted yet."""
    is_claimed = lease.claimed_until_s > clock_s
    if lease.use is LeaseUse.TURN:
        return Rank.CLAIMED_TURN if is_claimed else Rank.IDLE_TURN
    age_s = clock_s - lease.held_s
    if age_s < heartbeat_s:
        return None
    if is_claimed:
        return Rank.CLAIMED_PROMPT
    return Rank.DESERTED_PROMPT if age_s >= 2 * heartbeat_s else Rank.FRESH_PROMPT


def evict(
    candidates: Iterable[Candidate],
    references: BlockReferences,
    leased: int,
    demand: Demand,
    end: Callable[[Lease, str], None],
) -> bool:
    """End as many leases as it takes, and none whose blocks are all used by requests that run.

    Args:
        candidates: in the order of eviction.
        leased: `references.num_leased()`.
        end: ends a lease, with `evicted` as the reason.

    Returns:
        Whether `need` and `cap` are kept now.
    """
    free, slots_short = demand.free, demand.slots_short
    for rank, lease in candidates:
        lacks, is_over = free < demand.need, leased > demand.cap
        if rank is Rank.IDLE_TURN:
            goes = lacks or is_over or slots_short or free < demand.need + demand.reserve
        elif rank is Rank.DESERTED_PROMPT:
            goes = lacks or is_over
        elif rank is Rank.CLAIMED_TURN:
            goes = lacks or (is_over and demand.lasts)
        else:
            goes = (lacks or is_over) and demand.lasts
        if not goes or not (slots_short or references.can_give(lease.request_id)):
            continue
        gain = references.gain(lease.request_id)
        end(lease, "evicted")
        free, leased, slots_short = free + gain, leased - gain, False
    return free >= demand.need and leased <= demand.cap
