"""Blocks of failed loads that a worker may still write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.block_pool import BlockPool


class PinnedBlocks(NamedTuple):
    """The blocks of one failed load, and since when they are pinned."""

    blocks: tuple[int, ...]
    since_s: float


class QuarantinedBlocks:
    """Pins the blocks of failed loads, by request, until no worker reports that they may still be written.

    To release a transfer does not stop it: NIXL may write as long as its handle lives. But vLLM frees a failed
    request's blocks at once. So one more reference is taken on each block before that.

    Args:
        pool: the engine's; without it nothing is pinned.
    """

    def __init__(self, pool: BlockPool | None) -> None:
        self._pool = pool
        # By worker, its latest report: not every worker reports in every step.
        self._alive: dict[int, frozenset[str]] = {}
        # By request, as workers name loads; it may have ended. The oldest is first.
        self._pinned: dict[str, PinnedBlocks] = {}

    def __len__(self) -> int:
        """The number of requests whose blocks are pinned."""
        return len(self._pinned)

    @property
    def num_blocks(self) -> int:
        """The number of pinned blocks."""
        return sum(len(pin.blocks) for pin in self._pinned.values())

    def update(self, alive: Mapping[int, frozenset[str]], now_s: float) -> None:
        """Take the requests whose blocks may still be written, by worker, before vLLM frees blocks of the step."""
        if not alive or self._pool is None:
            return
        self._alive.update(alive)
        named = frozenset().union(*self._alive.values())
        for request_id in named - self._pinned.keys():
            self._pin(self._pool, request_id, now_s)
        for request_id in self._pinned.keys() - named:
            pin = self._pinned.pop(request_id)
            self._pool.give_back(pin.blocks)

    def gauges(self, now_s: float) -> dict[str, float]:
        """The gauges of pinned requests and blocks."""
        oldest_s = 0.0
        for pin in self._pinned.values():
            oldest_s = now_s - pin.since_s
            break
        return {
            "quarantined_requests_now": len(self._pinned),
            "quarantined_blocks_now": self.num_blocks,
            "oldest_quarantine_s": oldest_s,
        }

    def check_integrity(self) -> None:
        """Check that no pinned block is free.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        if self._pool is None:
            return
        num_free = 0
        for pin in self._pinned.values():
            for block in pin.blocks:
                if self._pool.reference_count(block) < 1:
                    num_free += 1
        if num_free:
            raise LocalProtocolError(
                f"quarantine: {num_free} of {self.num_blocks} pinned blocks are in the pool"
            )

    def _pin(self, pool: BlockPool, request_id: str, now_s: float) -> None:
        blocks = pool.loaded_into(request_id)
        pool.keep(blocks)
        self._pinned[request_id] = PinnedBlocks(blocks, now_s)
