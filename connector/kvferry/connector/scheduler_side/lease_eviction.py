"""Lease eviction: held leases end early when the engine needs their blocks or their slots.

A prompt's lease lives until its consumer has read it, an offer of a turn for minutes. Without this, an engine whose
router is slow, or lost what it was answered, would fill up with blocks that no consumer reads, and requests would wait
for them; and two engines that wait for each other's blocks would wait for ever. `eviction_order.py` has the order and
the rules, `waiting.py` counts what requests lack; here is counted what vLLM has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.idle import IdleState
from kvferry.connector.scheduler_side.waiting import UnfinishedRequests
from kvferry.scheduler.producer.eviction_order import Demand, Stall, evict
from kvferry.scheduler.producer.lease import Lease
from kvferry.scheduler.producer.ledger import ProducerLedger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_RESERVED = 8
"""Turns may be held while more than one in so many blocks, and slots, is free."""

_MANY = 1024
_RECHECK_S = 0.05
"""With more leases than `_MANY` that may not be evicted yet, they are checked again after this time."""

_COUNT_S = 10e-6
"""Counting the blocks that only leases keep takes most of a microsecond each: wait ten times as long."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What does not change while an engine lives.

    Attributes:
        most: blocks of the longest request that there can be.
        cap: blocks that leases alone may keep for longer than a heartbeat.
        reserve: blocks that turns leave free.
    """

    most: int
    cap: int
    reserve: int

    @classmethod
    def of(cls, manager: KVCacheManager, most: int, fraction: float, *, reserves: bool) -> _Bounds:
        """Those of an engine whose leases may keep a fraction of all blocks."""
        total = manager.block_pool.num_gpu_blocks
        reserve = total // _RESERVED if reserves else 0
        return cls(most, int((total - 1) * fraction), reserve)  # no null block


class LeaseEviction:
    """Compares once a step what is free with what requests need, and ends leases.

    Args:
        max_leased_fraction: of the engine's blocks, those that leases alone may keep for longer than a heartbeat.

    Attributes:
        unfinished: this engine's requests.
    """

    def __init__(
        self,
        config: VllmConfig,
        local: LocalEngine,
        leases: ProducerLedger,
        idle: IdleState,
        max_leased_fraction: float,
    ) -> None:
        self._requests = UnfinishedRequests(config)
        self.unfinished: Mapping[str, Request] = self._requests.by_id
        self._local = local
        self._leases = leases
        self._idle = idle
        self._fraction = max_leased_fraction
        self._manager: KVCacheManager | None = None
        self._bounds: _Bounds | None = None
        self._missed_since_s: float | None = None
        self._stall = Stall()
        self._recheck_s = 0.0
        self._first_coming: tuple[str | None, float] = (None, 0.0)

    def bind(self, manager: KVCacheManager) -> None:
        """Where the blocks belong."""
        self._manager = manager
        self._bounds = None
        blocks = manager.block_pool.blocks
        self._leases.block_references.bind(lambda block: int(blocks[block].ref_cnt))

    def arrived(self, request: Request) -> None:
        """A request will need blocks, and again after every preemption."""
        self._requests.add(request)

    def admitted(self, request: Request) -> None:
        """vLLM has given a request blocks: those that wait are not stalled. A preempted one may lack them again."""
        if not request.num_preemptions:
            self._stall.end()

    def finished(self, request_id: str) -> None:
        """It needs none any more."""
        self._requests.remove(request_id)
        self._stall.end()

    @property
    def is_coming(self) -> bool:
        """Whether blocks of leases that were ended are still on their way back into the pool.

        Where a worker's transfer thread is stuck they do not come, and vLLM must not go on waiting for them. An engine
        that wakes does not know yet of which leases it has slept through the end.
        """
        if self._idle.is_waking:
            return True
        if self._leases.clock_s > self._first_coming[1] + self._leases.heartbeat_s:
            return False
        return self._leases.block_references.num_coming() > 0

    def evict(self) -> None:
        """End as many leases as it takes; their blocks come back with the workers' reports, a step or two later.

        It counts what vLLM keeps to itself. Where that cannot be counted, the engine goes on, and leases live as long
        as they were given. Nor does it end any before it knows which are over anyway.
        """
        if self._idle.is_waking:
            return
        try:
            self._evict()
        except Exception:
            self._manager = None
            logger.exception("lease eviction disabled: free blocks could not be counted")

    def _evict(self) -> None:
        manager, references, clock_s = self._manager, self._leases.block_references, self._leases.clock_s
        first = references.first_ending()
        if first is None or first != self._first_coming[0]:
            self._first_coming = (first, clock_s)
        if manager is None or not references.num_requests or clock_s < self._recheck_s:
            return
        demand = self._demand(manager)
        if demand is None:
            self._missed_since_s = None
            return
        candidates = self._leases.candidates()
        leased = len(references)  # at least as many as leases alone keep
        if leased > demand.cap:
            self._recheck_s = clock_s + leased * _COUNT_S
            leased = references.num_leased()
        if evict(candidates, references, leased, demand, self._end):
            self._missed_since_s = None
        elif self._missed_since_s is None:
            self._missed_since_s = clock_s
        elif len(candidates) > _MANY:
            self._recheck_s = max(self._recheck_s, clock_s + _RECHECK_S)

    def _end(self, lease: Lease, how: str) -> None:
        self._leases.end_early(lease, how)
        logger.debug("req=%s slot=%d ends early (%s): others need its blocks", lease.request_id, lease.slot, how)

    def _demand(self, manager: KVCacheManager) -> Demand | None:
        """What leases are to give; None when they need not give anything."""
        if self._bounds is None:
            most = self._requests.most(manager)
            self._bounds = _Bounds.of(manager, most, self._fraction, reserves=self._local.offers_turns)
        references, bounds = self._leases.block_references, self._bounds
        free, leased = manager.block_pool.get_num_free_blocks(), len(references)
        slots_short = False
        if self._local.offers_turns:
            slots_short = self._leases.free_slots + references.num_ending < self._leases.slots / _RESERVED
        is_kept = leased <= bounds.cap and not slots_short
        if is_kept and free >= bounds.most + bounds.reserve:
            self._stall.end()
            return None  # no request can need more: nothing that grows with requests or blocks is looked at
        coming = references.num_coming()
        free += coming
        needs = self._requests.needs(manager)
        need = max((need for need in needs if need <= free + leased), default=0)
        stalled = self._stalled() if needs and not coming and free < bounds.most else 0
        if stalled:
            need = max(need, min(free + stalled, bounds.most))
        if is_kept and free >= need + bounds.reserve:
            return None
        clock_s, since_s = self._leases.clock_s, self._missed_since_s
        lasts = bool(stalled) or (since_s is not None and clock_s >= since_s + self._leases.heartbeat_s)
        return Demand(free, need, bounds.reserve, bounds.cap, slots_short, lasts)

    def _stalled(self) -> int:
        """Blocks besides the free ones that a request counts as lacking, since it has waited for a heartbeat."""
        if not self._stall.is_due(self._leases.clock_s, self._leases.heartbeat_s):
            return 0
        return self._stall.take() if self._requests.may_lack_blocks() else 0
