"""Lease eviction: which held leases end when blocks are needed, in what order, and how many.

Prefixes go before everything else, as soon as the engine's own requests may need their blocks: an engine that loses
one computes it, and no prefill was made for it alone. Until a consumer renews a lease it is unknown whether it will
be read. So next come turns that no consumer has renewed, then prompts that no consumer has renewed in time. Leases that
may still be read go only when the shortage has lasted for a heartbeat: waiting for slower consumers costs nothing,
while every lease that ends unread costs a prefill.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter

from kvferry.scheduler.producer.block_references import BlockReferences
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import LeaseUse, ProducerLease


class Rank(enum.IntEnum):
    """The order of eviction; within a rank the longest held goes first."""

    PREFIX = 0
    """The first tokens of a prompt, read by another engine."""
    IDLE_TURN = 1
    """A turn that no consumer has renewed within a lease's time."""
    DESERTED_PROMPT = 2
    """Held for two heartbeats and not renewed by a consumer."""
    FRESH_PROMPT = 3
    """Not renewed, but held for less than two heartbeats."""
    CLAIMED_TURN = 4
    CLAIMED_PROMPT = 5
    """A consumer has renewed it within a lease's time."""


Candidate = tuple[Rank, ProducerLease]


@dataclass(frozen=True, slots=True)
class Demand:
    """The blocks and slots that leases have to leave free.

    Attributes:
        free: blocks in the pool, or on their way back into it.
        need: blocks that must be free for a waiting request.
        reserve: further blocks that prefixes and turns have to leave free.
        cap: most blocks that leases alone may keep.
        are_slots_short: whether prefixes and turns occupy slots that other leases will need.
        lasts: whether `need` or `cap` has been missed for a heartbeat.
    """

    free: int
    need: int = 0
    reserve: int = 0
    cap: int = 1 << 62
    are_slots_short: bool = False
    lasts: bool = False


def rank_of(lease: ProducerLease, clock_s: float, heartbeat_s: float) -> Rank | None:
    """The rank of a held lease; None for a prompt that must not be evicted yet."""
    if lease.use is LeaseUse.PREFIX:
        return Rank.PREFIX
    is_claimed = lease.claimed_until_s > clock_s
    if lease.use is LeaseUse.TURN:
        return Rank.CLAIMED_TURN if is_claimed else Rank.IDLE_TURN
    age_s = clock_s - lease.held_s
    if age_s < heartbeat_s:
        return None
    if is_claimed:
        return Rank.CLAIMED_PROMPT
    if age_s >= 2 * heartbeat_s:
        return Rank.DESERTED_PROMPT
    return Rank.FRESH_PROMPT


def candidates(ledger: ProducerLedger) -> list[Candidate]:
    """The leases that may be evicted, in the order of eviction."""
    ranked: list[Candidate] = []
    for lease in ledger.block_references.held.values():
        rank = rank_of(lease, ledger.clock.awake_s, ledger.clock.heartbeat_s)
        if rank is not None:
            ranked.append((rank, lease))
    # The sort is stable: within a rank the longest held stays first.
    ranked.sort(key=itemgetter(0))
    return ranked


def release_idle_turns(ledger: ProducerLedger, how: str) -> int:
    """End the turns that no consumer has renewed within a lease's time. Returns how many."""
    idle = [lease for rank, lease in candidates(ledger) if rank is Rank.IDLE_TURN]
    for lease in idle:
        ledger.end(lease, how)
    return len(idle)


def evict(
    candidates: Iterable[Candidate],
    references: BlockReferences,
    leased: int,
    demand: Demand,
    end: Callable[[ProducerLease, str], None],
) -> bool:
    """End as many leases as the demand takes, and none whose blocks are all used by running requests.

    Args:
        candidates: in the order of eviction.
        leased: `references.num_leased()`.
        end: ends a lease, with `evicted` as the reason.

    Returns:
        Whether `need` and `cap` are met now.
    """
    free = demand.free
    are_slots_short = demand.are_slots_short
    for rank, lease in candidates:
        lacks_blocks = free < demand.need
        are_too_many_leased = leased > demand.cap
        if rank in (Rank.PREFIX, Rank.IDLE_TURN):
            lacks_reserve = free < demand.need + demand.reserve
            must_end = (
                lacks_blocks or are_too_many_leased or are_slots_short or lacks_reserve
            )
        elif rank is Rank.DESERTED_PROMPT:
            must_end = lacks_blocks or are_too_many_leased
        elif rank is Rank.CLAIMED_TURN:
            must_end = lacks_blocks or (are_too_many_leased and demand.lasts)
        else:
            must_end = (lacks_blocks or are_too_many_leased) and demand.lasts
        if not must_end:
            continue
        # A lease whose blocks running requests use as well frees none of them, but it frees a slot.
        if not are_slots_short and not references.can_give(lease):
            continue
        gain = references.gain(lease)
        end(lease, "evicted")
        free += gain
        leased -= gain
        are_slots_short = False
    return free >= demand.need and leased <= demand.cap
