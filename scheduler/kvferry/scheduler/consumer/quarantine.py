"""Blocks of failed loads that a worker may still write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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

    Attributes:
        pool: as given.
    """

    def __init__(self, pool: BlockPool | None) -> None:
        self.pool = pool
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
        if not alive or self.pool is None:
            return
        self._alive.update(alive)
        named = frozenset().union(*self._alive.values())
        for request_id in named - self._pinned.keys():
            self._pin(self.pool, request_id, now_s)
        for request_id in self._pinned.keys() - named:
            pin = self._pinned.pop(request_id)
            self.pool.give_back(pin.blocks)

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

    def snapshot(self) -> Mapping[str, PinnedBlocks]:
        """The pinned blocks now, by request."""
        return dict(self._pinned)

    def _pin(self, pool: BlockPool, request_id: str, now_s: float) -> None:
        blocks = pool.loaded_into(request_id)
        pool.keep(blocks)
        self._pinned[request_id] = PinnedBlocks(blocks, now_s)
