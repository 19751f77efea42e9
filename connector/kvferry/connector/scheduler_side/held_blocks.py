"""Blocks of ended requests, kept out of the pool by this connector's own references.

vLLM can hold a request's blocks itself if a connector asks it to delay their free. But then the request stays in its
scheduler, and the engine steps every millisecond, on more than one core, as long as the blocks are held. So vLLM frees
the blocks as usual, and this module takes one more reference on each block before that.

Blocks of failed loads are kept out of the pool in the same way until no worker reports that they may still be written:
vLLM frees a failed request's blocks at once, and they are pinned before that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvferry.connector.vllm_internals import EngineBlocks
from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.producer.block_references import BlockReferences

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class HeldBlocks:
    """One reference per request and block."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._of: dict[str, list[list[KVCacheBlock]]] = {}

    def hold(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Take references on the blocks of a request that vLLM is about to free.

        Args:
            block_ids: the blocks: all of the request's, or those of `ids_to_hold`.
        """
        if request_id in self._of:
            raise LocalProtocolError(f"req={request_id}: its blocks are held already")
        groups = self._blocks.of(request_id)
        held = groups if sum(map(len, groups)) == len(block_ids) else _chosen(groups, block_ids)
        for blocks in held:
            self._blocks.keep(blocks)
        self._of[request_id] = held

    def give_back(self, request_id: str) -> None:
        """Free a request's blocks; unknown requests are ignored."""
        for blocks in self._of.pop(request_id, ()):
            self._blocks.give_back(blocks)

    def check_integrity(self, references: BlockReferences) -> None:
        """Check that there is a reference on every block that the leases count, and on no other.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        if self._of.keys() != references.requests():
            raise LocalProtocolError(
                f"held blocks: of {len(self._of)} requests, leases of {references.num_requests} keep some"
            )
        for request_id, groups in self._of.items():
            found = sorted(block.block_id for blocks in groups for block in blocks)
            counted = sorted(references.of(request_id))
            if found != counted:
                raise LocalProtocolError(
                    f"req={request_id}: {len(found)} blocks are held, its lease keeps {len(counted)}"
                )


def _chosen(groups: Sequence[Sequence[KVCacheBlock]], block_ids: Sequence[int]) -> list[list[KVCacheBlock]]:
    """The blocks of a request that are in `block_ids`, by group; a block of two groups only once."""
    wanted, held = set(block_ids), []
    for blocks in groups:
        chosen = [block for block in blocks if block.block_id in wanted]
        wanted.difference_update([block.block_id for block in chosen])
        held.append(chosen)
    return held


def ids_to_hold(block_ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Every block of a request once, without the null block (0) that vLLM uses for blocks that left a window."""
    return tuple(dict.fromkeys(filter(None, chain.from_iterable(block_ids))))


class QuarantinedBlocks:
    """Pins the blocks of failed loads, by request."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._alive: dict[int, frozenset[str]] = {}
        self._pinned: dict[str, list[KVCacheBlock]] = {}
        self._since_s: dict[str, float] = {}  # the oldest is first
        self._reported = True

    def __len__(self) -> int:
        """The number of requests whose blocks are pinned."""
        return len(self._pinned)

    def num_blocks(self) -> int:
        """The number of pinned blocks."""
        return sum(len(blocks) for blocks in self._pinned.values())

    def update(self, alive: Mapping[int, frozenset[str]]) -> None:
        """Take the requests whose blocks may still be written, by worker, before vLLM frees blocks of the step."""
        self._alive.update(alive)
        named = frozenset().union(*self._alive.values()) if self._alive else frozenset()
        for request_id in named - self._pinned.keys():
            self._pin(request_id)
        for request_id in self._pinned.keys() - named:
            self._unpin(request_id)

    def gauges(self, now_s: float) -> dict[str, float]:
        """The gauges of pinned requests and blocks; {} if there are none and that has been reported."""
        reported, self._reported = self._reported, not self._pinned
        if reported and not self._pinned:
            return {}
        oldest_s = now_s - next(iter(self._since_s.values())) if self._since_s else 0.0
        return {
            "quarantined_requests_now": len(self),
            "quarantined_blocks_now": self.num_blocks(),
            "oldest_quarantine_s": oldest_s,
        }

    def check_integrity(self) -> None:
        """Check that blocks that may still be written are pinned, and that none of them is free.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        named = frozenset().union(*self._alive.values()) if self._alive else frozenset()
        if self._blocks.is_bound and named != self._pinned.keys():
            raise LocalProtocolError(f"quarantine: {len(named)} requests are named, {len(self._pinned)} are pinned")
        given = [block.block_id for blocks in self._pinned.values() for block in blocks if block.ref_cnt < 1]
        if given:
            raise LocalProtocolError(f"quarantine: {len(given)} of {self.num_blocks()} pinned blocks are in the pool")

    def _pin(self, request_id: str) -> None:
        if not self._blocks.is_bound:
            return
        blocks = [block for group in self._blocks.of(request_id) for block in group if not block.is_null]
        self._blocks.keep(blocks)
        self._pinned[request_id] = blocks
        self._since_s[request_id] = time.monotonic()
        self._reported = False

    def _unpin(self, request_id: str) -> None:
        del self._since_s[request_id]
        self._blocks.give_back(self._pinned.pop(request_id))
