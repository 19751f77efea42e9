"""Lease eviction: held leases end early when the engine needs their blocks or their slots.

A prompt's lease lives until its consumer has read it, an offered turn's for minutes. Without eviction, if the router is
slow or loses a response, the cache would fill up with blocks that no consumer reads, and requests would wait for them;
two engines that wait for each other's blocks would wait for ever. `eviction_order.py` has the order and the rules,
`waiting.py` counts the blocks that requests lack, and this module counts the blocks that vLLM has.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.idle import IdleState
from kvferry.connector.scheduler_side.waiting import UnfinishedRequests
from kvferry.connector.vllm_internals import EngineBlocks
from kvferry.scheduler.producer.eviction_order import Demand, candidates, evict
from kvferry.scheduler.producer.lease import Lease
from kvferry.scheduler.producer.ledger import ProducerLedger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_RESERVED = 8
"""Turns may be held while more than 1/8 of the blocks and of the slots are free."""

_MANY = 1024
_RECHECK_S = 0.05
"""If more than `_MANY` leases may not be evicted yet, they are checked again after this time."""

_COUNT_S = 10e-6
"""Wait per leased block before counting again: ten times the cost of counting the blocks that only leases keep."""


class LeaseEviction:
    """Compares the free blocks with the requests' need once per step, and ends leases.

    Args:
        max_leased_fraction: fraction of the engine's blocks that leases alone may keep for longer than a heartbeat.

    Attributes:
        requests: this engine's: each needs blocks, now and after every preemption.
    """

    def __init__(
        self,
        config: VllmConfig,
        local: LocalEngine,
        leases: ProducerLedger,
        idle: IdleState,
        blocks: EngineBlocks,
        max_leased_fraction: float,
    ) -> None:
        self.requests = UnfinishedRequests(config)
        self._local = local
        self._leases = leases
        self._idle = idle
        self._fraction = max_leased_fraction
        self._blocks = blocks
        self._is_disabled = False
        self._missed_since_s: float | None = None
        self._recheck_s = 0.0
        self._first_coming: tuple[str | None, float] = (None, 0.0)

    @property
    def is_coming(self) -> bool:
        """Whether blocks of ended leases will return to the pool soon.

        If a worker's transfer thread is stuck they do not return, and vLLM must not wait for them for ever. It is also
        True while the engine wakes: it does not know yet which leases ended while it slept.
        """
        if self._idle.is_waking:
            return True
        if self._leases.clock_s > self._first_coming[1] + self._leases.clock.heartbeat_s:
            return False
        return self._leases.block_references.num_coming() > 0

    def evict(self) -> None:
        """End as many leases as needed; their blocks return with the workers' reports, a step or two later.

        It reads vLLM's internals. If that fails, eviction is disabled: the engine goes on, and leases live until they
        expire. While the engine wakes no lease is ended, since it is not known yet which are over.
        """
        if self._idle.is_waking or self._is_disabled:
            return
        try:
            self._evict()
        except Exception:
            self._is_disabled = True
            logger.exception("lease eviction disabled: free blocks could not be counted")

    def _evict(self) -> None:
        references, clock_s = self._leases.block_references, self._leases.clock_s
        first = next(iter(references.ending), None)
        if first is None or first != self._first_coming[0]:
            self._first_coming = (first, clock_s)
        if not references.num_requests or clock_s < self._recheck_s or self._blocks.longest is None:
            return
        demand = self._demand(self._blocks.longest)
        if demand is None:
            self._missed_since_s = None
            return
        found = candidates(self._leases)
        leased = len(references)  # at least as many as leases alone keep
        if leased > demand.cap:
            self._recheck_s = clock_s + leased * _COUNT_S
            leased = references.num_leased()
        if evict(found, references, leased, demand, self._end):
            self._missed_since_s = None
        elif self._missed_since_s is None:
            self._missed_since_s = clock_s
        elif len(found) > _MANY:
            self._recheck_s = max(self._recheck_s, clock_s + _RECHECK_S)

    def _end(self, lease: Lease, how: str) -> None:
        self._leases.end(lease, how)
        logger.debug("req=%s slot=%d: lease ended early (%s)", lease.request_id, lease.slot, how)

    def _demand(self, longest: int) -> Demand | None:
        """The blocks and slots that leases must give up; None if none.

        Args:
            longest: blocks of the longest possible request.
        """
        references, num_blocks = self._leases.block_references, self._blocks.num_blocks
        offers_turns = self._local.offers_turns
        cap = int((num_blocks - 1) * self._fraction)  # without the null block
        reserve = num_blocks // _RESERVED if offers_turns else 0
        free, leased = self._blocks.num_free, len(references)
        slots_short = False
        if offers_turns:
            slots_short = self._leases.free_slots + len(references.ending) < self._leases.slots / _RESERVED
        is_kept = leased <= cap and not slots_short
        if is_kept and free >= longest + reserve:
            self.requests.end_stall()
            return None  # no request can need more; this path has constant cost
        coming = references.num_coming()
        free += coming
        needs = self.requests.needs(self._blocks)
        need = max((need for need in needs if need <= free + leased), default=0)
        clock_s, heartbeat_s, stalled = self._leases.clock_s, self._leases.clock.heartbeat_s, 0
        if needs and not coming and free < longest and (stalled := self.requests.stalled_blocks(clock_s, heartbeat_s)):
            need = max(need, min(free + stalled, longest))
        if is_kept and free >= need + reserve:
            return None
        since_s = self._missed_since_s
        lasts = bool(stalled) or (since_s is not None and clock_s >= since_s + heartbeat_s)
        return Demand(free, need, reserve, cap, slots_short, lasts)
