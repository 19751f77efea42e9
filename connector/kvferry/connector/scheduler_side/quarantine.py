"""Blocks of failed loads, pinned until no worker reports that they may still be written.

vLLM frees a failed request's blocks at once. So this connector takes one more reference on each block before that, as
leases do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvferry.connector.vllm_internals import EngineBlocks
from kvferry.protocol.errors import LocalProtocolError


class QuarantinedBlocks:
    """Pins the blocks of failed loads, by request."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._alive: dict[int, frozenset[str]] = {}
        self._pinned: dict[str, tuple[tuple[int, ...], float]] = {}  # blocks, and since when; the oldest is first
        self._reported = True

    def __len__(self) -> int:
        """The number of requests whose blocks are pinned."""
        return len(self._pinned)

    def update(self, alive: Mapping[int, frozenset[str]]) -> None:
        """Take the requests whose blocks may still be written, by worker, before vLLM frees blocks of the step."""
        if not alive:
            return
        self._alive.update(alive)
        named = frozenset().union(*self._alive.values())
        for request_id in named - self._pinned.keys():
            self._pin(request_id)
        for request_id in self._pinned.keys() - named:
            self._blocks.give_back(self._pinned.pop(request_id)[0])

    def gauges(self, now_s: float) -> dict[str, float]:
        """The gauges of pinned requests and blocks; {} if there are none and that has been reported."""
        reported, self._reported = self._reported, not self._pinned
        if reported and not self._pinned:
            return {}
        return {
            "quarantined_requests_now": len(self._pinned),
            "quarantined_blocks_now": sum(len(blocks) for blocks, _ in self._pinned.values()),
            "oldest_quarantine_s": next((now_s - since_s for _, since_s in self._pinned.values()), 0.0),
        }

    def check_integrity(self) -> None:
        """Check that no pinned block is free.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        pinned = [block for blocks, _ in self._pinned.values() for block in blocks]
        given = [block for block in pinned if self._blocks.reference_count(block) < 1]
        if given:
            raise LocalProtocolError(f"quarantine: {len(given)} of {len(pinned)} pinned blocks are in the pool")

    def _pin(self, request_id: str) -> None:
        blocks = self._blocks.of(request_id)
        self._blocks.keep(blocks)
        self._pinned[request_id] = blocks, time.monotonic()
        self._reported = False
