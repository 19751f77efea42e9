"""Lease eviction: held leases end early when the engine needs their blocks or their slots.

A prompt's lease lives until its consumer has read it, an offered turn's for minutes. Without eviction, if the router is
slow or loses a response, the cache would fill up with blocks that no consumer reads, and requests would wait for them;
two engines that wait for each other's blocks would wait for ever.

This module counts the blocks that requests lack and that vLLM has; `eviction_order.py` has the order and the rules.
"""

from __future__ import annotations

import logging

from kvferry.connector.scheduler_side.block_demand import BlockDemand
from kvferry.connector.scheduler_side.requests import SchedulerContext
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.scheduler.producer.eviction_order import Demand, candidates, evict
from kvferry.scheduler.producer.lease import ProducerLease

logger = logging.getLogger(__name__)

_RESERVED = 8
"""Turns and prefixes may be held while more than 1/8 of the blocks and of the slots are free."""

_MANY = 1024
_RECHECK_S = 0.05
"""If more than `_MANY` leases may not be evicted yet, they are checked again after this time."""

_COUNT_S_PER_BLOCK = 10e-6
"""Wait per leased block before counting again: ten times the cost of counting the blocks that only leases keep."""


class LeaseEviction:
    """Compares the free blocks with the requests' need once per step, and ends leases.

    Args:
        block_demand: the blocks that this engine's requests lack.
        max_leased_fraction: fraction of the engine's blocks that leases alone may keep for longer than a heartbeat.
    """

    def __init__(
        self,
        context: SchedulerContext,
        block_demand: BlockDemand,
        steps: Steps,
        max_leased_fraction: float,
    ) -> None:
        self._offers_turns = context.local.offers_turns
        self._leases = context.leases
        self._blocks = context.blocks
        self._block_demand = block_demand
        self._steps = steps
        self._max_leased_fraction = max_leased_fraction
        self._is_disabled = False
        # When leases that may still be read were first too many; None while they are not.
        self._missed_since_s: float | None = None
        self._recheck_s = 0.0
        self._first_ending: str | None = None
        self._first_ending_since_s = 0.0

    @property
    def is_coming(self) -> bool:
        """True if blocks of ended leases will return to the pool soon, so that vLLM should wait and not preempt."""
        # While the engine wakes, it does not know yet which leases ended while it slept.
        if self._steps.is_waking:
            return True
        # If a worker's transfer thread is stuck, blocks do not return, and vLLM must not wait for them for ever: the
        # lease that has been ending for the longest has a heartbeat.
        heartbeat_s = self._leases.clock.heartbeat_s
        if self._leases.clock_s > self._first_ending_since_s + heartbeat_s:
            return False
        return self._leases.block_references.num_coming() > 0

    def evict(self) -> None:
        """End as many leases as needed; their blocks return with the workers' reports, a step or two later."""
        # While the engine wakes it is not known which leases are over. To end others would cost a prefill each.
        if self._steps.is_waking or self._is_disabled:
            return
        # This reads vLLM's internals. Without eviction the engine goes on, and leases live until they expire.
        try:
            self._evict()
        except Exception:
            self._is_disabled = True
            logger.exception(
                "lease eviction disabled: free blocks could not be counted"
            )

    def _evict(self) -> None:
        references = self._leases.block_references
        clock_s = self._leases.clock_s
        self._note_first_ending()
        longest = self._blocks.longest
        if longest is None or not references.num_requests or clock_s < self._recheck_s:
            return
        demand = self._demand(longest)
        if demand is None:
            self._missed_since_s = None
            return
        ranked = candidates(self._leases)
        # At least as many as leases alone keep, and free to know.
        num_leased = len(references)
        if num_leased > demand.cap:
            self._recheck_s = clock_s + num_leased * _COUNT_S_PER_BLOCK
            num_leased = references.num_leased()
        if evict(ranked, references, num_leased, demand, self._end):
            self._missed_since_s = None
        elif self._missed_since_s is None:
            self._missed_since_s = clock_s
        elif len(ranked) > _MANY:
            self._recheck_s = max(self._recheck_s, clock_s + _RECHECK_S)

    def _note_first_ending(self) -> None:
        first = next(iter(self._leases.block_references.ending), None)
        if first is None or first != self._first_ending:
            self._first_ending = first
            self._first_ending_since_s = self._leases.clock_s

    def _end(self, lease: ProducerLease, how: str) -> None:
        self._leases.end(lease, how)
        logger.debug(
            "req=%s slot=%d: lease ended early (%s)", lease.request_id, lease.slot, how
        )

    def _demand(self, longest: int) -> Demand | None:
        """The blocks and slots that leases must give up; None if none.

        Args:
            longest: blocks of the longest possible request.
        """
        references = self._leases.block_references
        num_blocks = self._blocks.num_blocks
        # Without the null block.
        cap = int((num_blocks - 1) * self._max_leased_fraction)
        reserve = 0
        if self._offers_turns or self._leases.num_prefixes:
            reserve = num_blocks // _RESERVED
        are_slots_short = self._are_slots_short()
        num_leased = len(references)
        is_within_limits = num_leased <= cap and not are_slots_short
        num_free = self._blocks.num_free
        if is_within_limits and num_free >= longest + reserve:
            # No request can need more. Most steps end here, so this is all that they pay: it has constant cost.
            self._block_demand.end_stall()
            return None
        num_coming = references.num_coming()
        num_free += num_coming
        needs = self._block_demand.needs()
        # A request that lacks more than all leases could give up is not admitted by eviction. It waits for running
        # ones, and the leases would end for nothing.
        need = max((need for need in needs if need <= num_free + num_leased), default=0)
        stalled_blocks = 0
        may_be_stalled = bool(needs) and not num_coming and num_free < longest
        if may_be_stalled:
            stalled_blocks = self._block_demand.stalled_blocks(
                self._leases.clock_s, self._leases.clock.heartbeat_s
            )
        if stalled_blocks:
            need = max(need, min(num_free + stalled_blocks, longest))
        if is_within_limits and num_free >= need + reserve:
            return None
        return Demand(
            free=num_free,
            need=need,
            reserve=reserve,
            cap=cap,
            are_slots_short=are_slots_short,
            lasts=bool(stalled_blocks) or self._is_missed_for_long(),
        )

    def _are_slots_short(self) -> bool:
        """True if turns or prefixes occupy slots that other leases will need."""
        if not self._offers_turns and not self._leases.num_prefixes:
            return False
        slots = self._leases.slots
        num_free = slots.free + len(self._leases.block_references.ending)
        return num_free < slots.count / _RESERVED

    def _is_missed_for_long(self) -> bool:
        """True if the need or the cap has been missed for a heartbeat."""
        if self._missed_since_s is None:
            return False
        heartbeat_s = self._leases.clock.heartbeat_s
        return self._leases.clock_s >= self._missed_since_s + heartbeat_s
