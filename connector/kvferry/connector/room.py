"""Turns that nobody has come for give way when the engine needs their blocks or their slots.

An offer lives for minutes, and a decoder answers many conversations in that time: without this, requests would wait for
the blocks of conversations that may never go on. The offer that would run out first goes first; one that a prefill
waits with goes last, and only when a request here cannot be served without its blocks: two engines that wait for each
other's blocks would wait for ever.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvferry.connector.own_engine import OwnEngine
from kvferry.scheduler.producer.ledger import ProducerLedger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_RESERVED = 8
"""Turns may be held while more than one in so many blocks, and slots, is free."""

_NEEDS_BLOCKS = frozenset(
    (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, RequestStatus.PREEMPTED)
)
"""Also where a request is after a load, failed or not; while it loads it has the blocks for that."""


class Room:
    """Watches what is free, once a step."""

    def __init__(self, own: OwnEngine, leases: ProducerLedger) -> None:
        self._own = own
        self._leases = leases
        self._manager: KVCacheManager | None = None
        self._unfinished: dict[str, Request] = {}
        self._coming: dict[str, int] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Where the blocks belong."""
        self._manager = manager

    def arrived(self, request: Request) -> None:
        """A request will need blocks, and again after every preemption."""
        if self._own.offers_turns:
            self._unfinished[request.request_id] = request

    def finished(self, request_id: str) -> None:
        """It needs none any more."""
        self._unfinished.pop(request_id, None)

    def freed(self, request_id: str) -> None:
        """The blocks of a held request are back in the pool."""
        self._coming.pop(request_id, None)

    @property
    def is_coming(self) -> bool:
        """Whether blocks of ended turns are still on their way back into the pool."""
        return any(self._coming.values())

    def make(self) -> None:
        """End as many turns as it takes; their blocks come back with the workers' reports, a step or two later."""
        manager = self._manager
        if manager is None or not self._own.offers_turns:
            return
        need = self._largest_need(manager)
        reserve = manager.block_pool.num_gpu_blocks // _RESERVED
        while self._free_blocks(manager) < reserve + need or self._free_slots() < self._leases.slots / _RESERVED:
            request_id = self._leases.release_first_turn("room", claimed=self._free_blocks(manager) < need)
            if request_id is None:
                return
            groups = manager.get_blocks(request_id).blocks
            self._coming[request_id] = sum(block.ref_cnt == 1 for group in groups for block in group)
            logger.debug("req=%s is offered no longer: its %d blocks are needed", request_id, self._coming[request_id])

    def _free_blocks(self, manager: KVCacheManager) -> int:
        free: int = manager.block_pool.get_num_free_blocks()
        return free + sum(self._coming.values())

    def _free_slots(self) -> int:
        return self._leases.free_slots + len(self._coming)

    def _largest_need(self, manager: KVCacheManager) -> int:
        """Blocks, at most, that a request lacks: not that of the oldest, since vLLM passes over some that wait."""
        waiting = [request for request in self._unfinished.values() if request.status in _NEEDS_BLOCKS]
        fresh = max((request.num_tokens for request in waiting if not request.num_computed_tokens), default=0)
        begun = (request for request in waiting if request.num_computed_tokens)
        return max(_blocks(manager, fresh), *(_blocks(manager, x.num_tokens) - _held(manager, x) for x in begun), 0)


def _blocks(manager: KVCacheManager, num_tokens: int) -> int:
    """Blocks of a sequence in all groups; vLLM's own bound where a window or a chunk lets go of the older ones."""
    return sum(
        min(-(-num_tokens // group.block_size), group.max_admission_blocks_per_request or num_tokens)
        for group in manager.coordinator.single_type_managers
    )


def _held(manager: KVCacheManager, request: Request) -> int:
    return sum(not block.is_null for group in manager.get_blocks(request.request_id).blocks for block in group)
