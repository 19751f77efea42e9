"""Blocks of failed loads that may still be written: kept out of the pool until every worker says they are safe.

vLLM frees a failed request's blocks at once. They are pinned before that happens, by a reference of our own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvferry.protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Quarantine:
    """Pins blocks by request."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._alive: dict[int, frozenset[str]] = {}
        self._pinned: dict[str, list[KVCacheBlock]] = {}
        self._since_s: dict[str, float] = {}  # the oldest is first
        self._told = True

    def bind(self, manager: KVCacheManager) -> None:
        """Where the blocks belong."""
        self._manager = manager

    def __len__(self) -> int:
        """Requests whose blocks are pinned."""
        return len(self._pinned)

    def num_blocks(self) -> int:
        """Blocks that are pinned."""
        return sum(len(blocks) for blocks in self._pinned.values())

    def update(self, alive: Mapping[int, frozenset[str]]) -> None:
        """Take the workers' word on what may still be written. Call it before vLLM frees anything of this step."""
        self._alive.update(alive)
        named = frozenset().union(*self._alive.values()) if self._alive else frozenset()
        for request_id in named - self._pinned.keys():
            self._pin(request_id)
        for request_id in self._pinned.keys() - named:
            self._unpin(request_id)

    def gauges(self, now_s: float) -> dict[str, float]:
        """How much is pinned, and how long the oldest has been; {} when nothing is and that has been told."""
        told, self._told = self._told, not self._pinned
        if told and not self._pinned:
            return {}
        oldest_s = now_s - next(iter(self._since_s.values())) if self._since_s else 0.0
        return {
            "quarantined_requests_now": len(self),
            "quarantined_blocks_now": self.num_blocks(),
            "oldest_quarantine_s": oldest_s,
        }

    def check_integrity(self) -> None:
        """Check that what may still be written is pinned, and that the pool has not given it away.

        Raises:
            LocalProtocolError: with the sums.
        """
        named = frozenset().union(*self._alive.values()) if self._alive else frozenset()
        if self._manager is not None and named != self._pinned.keys():
            raise LocalProtocolError(f"quarantine: {len(named)} requests are named, {len(self._pinned)} are pinned")
        given = [block.block_id for blocks in self._pinned.values() for block in blocks if block.ref_cnt < 1]
        if given:
            raise LocalProtocolError(f"quarantine: {len(given)} of {self.num_blocks()} pinned blocks are in the pool")

    def _pin(self, request_id: str) -> None:
        if self._manager is None:
            return
        groups = self._manager.get_blocks(request_id).blocks
        blocks = [block for group in groups for block in group if not block.is_null]
        self._manager.block_pool.touch(blocks)
        self._pinned[request_id] = blocks
        self._since_s[request_id] = time.monotonic()
        self._told = False

    def _unpin(self, request_id: str) -> None:
        blocks = self._pinned.pop(request_id)
        del self._since_s[request_id]
        if self._manager is not None:
            self._manager.block_pool.free_blocks(reversed(blocks))
