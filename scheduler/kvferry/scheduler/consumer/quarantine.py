"""Blocks of failed loads that a worker may still write."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.block_pool import BlockPool


class QuarantinedBlocks:
    """Pins the blocks of failed loads, by request, until no worker reports that they may still be written.

    vLLM frees a failed request's blocks at once. So one more reference is taken on each block before that.

    Args:
        pool: the engine's; without it nothing is pinned.
    """

    def __init__(self, pool: BlockPool | None) -> None:
        self._pool = pool
        self._alive: dict[int, frozenset[str]] = {}
        self._pinned: dict[
            str, tuple[tuple[int, ...], float]
        ] = {}  # blocks, and since when; the oldest is first

    def __len__(self) -> int:
        """The number of requests whose blocks are pinned."""
        return len(self._pinned)

    @property
    def num_blocks(self) -> int:
        """The number of pinned blocks."""
        return sum(len(blocks) for blocks, _ in self._pinned.values())

    def update(self, alive: Mapping[int, frozenset[str]], now_s: float) -> None:
        """Take the requests whose blocks may still be written, by worker, before vLLM frees blocks of the step."""
        if not alive or self._pool is None:
            return
        self._alive.update(alive)
        named = frozenset().union(*self._alive.values())
        for request_id in named - self._pinned.keys():
            self._pin(self._pool, request_id, now_s)
        for request_id in self._pinned.keys() - named:
            self._pool.give_back(self._pinned.pop(request_id)[0])

    def gauges(self, now_s: float) -> dict[str, float]:
        """The gauges of pinned requests and blocks."""
        return {
            "quarantined_requests_now": len(self._pinned),
            "quarantined_blocks_now": self.num_blocks,
            "oldest_quarantine_s": next(
                (now_s - since_s for _, since_s in self._pinned.values()), 0.0
            ),
        }

    def check_integrity(self) -> None:
        """Check that no pinned block is free.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        pinned = [block for blocks, _ in self._pinned.values() for block in blocks]
        given = [
            block
            for block in pinned
            if self._pool is not None and self._pool.reference_count(block) < 1
        ]
        if given:
            raise LocalProtocolError(
                f"quarantine: {len(given)} of {len(pinned)} pinned blocks are in the pool"
            )

    def _pin(self, pool: BlockPool, request_id: str, now_s: float) -> None:
        blocks = pool.loaded_into(request_id)
        pool.keep(blocks)
        self._pinned[request_id] = blocks, now_s
