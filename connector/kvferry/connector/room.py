"""Turns that nobody has come for give way when the engine needs their blocks or their slots.

An offer lives for minutes, and a decoder answers many conversations in that time: without this, requests would wait for
the blocks of conversations that may never go on. The offer that would run out first goes first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvferry.connector.own_engine import OwnEngine
from kvferry.scheduler.producer.ledger import ProducerLedger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_RESERVED = 8
"""Turns may be held while more than one in so many blocks, and slots, is free."""


class Room:
    """Watches what is free, once a step."""

    def __init__(self, own: OwnEngine, leases: ProducerLedger) -> None:
        self._own = own
        self._leases = leases
        self._manager: KVCacheManager | None = None
        self._waiting: dict[str, int] = {}
        self._coming: dict[str, int] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Where the blocks belong."""
        self._manager = manager

    def arrived(self, request: Request) -> None:
        """A request will need blocks."""
        if self._own.offers_turns:
            self._waiting[request.request_id] = request.num_tokens

    def settled(self, request_id: str) -> None:
        """It has them, or needs none any more."""
        self._waiting.pop(request_id, None)

    def freed(self, request_id: str) -> None:
        """The blocks of a held request are back in the pool."""
        self._coming.pop(request_id, None)

    def make(self) -> None:
        """End as many turns as it takes; their blocks come back with the workers' reports, a step or two later."""
        if self._manager is None or not self._own.offers_turns:
            return
        while self._is_scarce(self._manager):
            request_id = self._leases.release_first_turn("room")
            if request_id is None:
                return
            groups = self._manager.get_blocks(request_id).blocks
            self._coming[request_id] = sum(block.ref_cnt == 1 for group in groups for block in group)
            logger.debug("req=%s is offered no longer: its %d blocks are needed", request_id, self._coming[request_id])

    def _is_scarce(self, manager: KVCacheManager) -> bool:
        pool = manager.block_pool
        free = pool.get_num_free_blocks() + sum(self._coming.values())
        slots = self._leases.free_slots + len(self._coming)
        return free < pool.num_gpu_blocks // _RESERVED + self._next_need() or slots < self._leases.slots / _RESERVED

    def _next_need(self) -> int:
        """Blocks, at most, of the request that waits longest."""
        tokens = next(iter(self._waiting.values()), 0)
        return sum(-(-tokens // span) for span in self._own.block_spans)
