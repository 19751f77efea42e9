"""Which block of the producer belongs in which block of the consumer, for one request and one cache group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.plan.descriptors import BlockPairs, expand_blocks
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that a request does not hold, e.g. those that left its window."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """One side's blocks of one request in one cache group.

    Attributes:
        ids: scheduler blocks; they end with the block of the last token.
        group: the group's facts on that side.
        kernel_tokens: tokens per kernel block on that side.
        kernel_blocks: how many kernel blocks the cache has.
    """

    ids: Sequence[int]
    group: CacheGroup
    kernel_tokens: int
    kernel_blocks: int

    @property
    def ratio(self) -> int:
        """Kernel blocks per scheduler block."""
        return self.group.block_tokens // self.kernel_tokens


def pair_blocks(
    index: int, local: GroupBlocks, remote: GroupBlocks, first_token: int, stop_token: int, num_tokens: int
) -> BlockPairs:
    """Pair the kernel blocks that hold tokens `[first_token, stop_token)`.

    Args:
        index: the group's index, for errors.
        local: blocks from the request's first token on; null blocks where none is held.
        remote: the last `len(ids)` of the `ceil(num_tokens / block_tokens)` blocks that the sequence has.
        num_tokens: tokens that the remote blocks hold.

    Raises:
        InvalidParams: the remote ids do not cover what the local blocks need, or leave the remote cache.
    """
    field = f"remote_block_ids[{index}]"
    total = -(-num_tokens // remote.group.block_tokens)
    if len(remote.ids) > total:
        raise InvalidParams(field, f"{len(remote.ids)} blocks", f"at most {total} blocks for {num_tokens} tokens")
    if stop_token > num_tokens:
        raise InvalidParams(field, f"tokens up to {stop_token}", f"at most the {num_tokens} tokens that are held")
    here, there = _by_kernel_block(local), _by_kernel_block(remote)
    kernel = local.kernel_tokens
    wanted = np.arange(first_token // kernel, -(-stop_token // kernel), dtype=np.int64)
    if len(wanted) and wanted[-1] >= len(here):
        raise InvalidParams(field, f"tokens up to {stop_token}", f"no more than {len(here) * kernel} local tokens")
    wanted = wanted[here[wanted] >= 0]
    told = wanted - (total - len(remote.ids)) * remote.ratio
    if len(told) and (told[0] < 0 or told[-1] >= len(there) or bool((there[told] < 0).any())):
        raise InvalidParams(
            field, f"{len(remote.ids)} blocks", f"blocks for all tokens from {first_token} to {stop_token}"
        )
    sources = there[told]
    if len(sources) and int(sources.max()) >= remote.kernel_blocks:
        most = remote.kernel_blocks // remote.ratio - 1
        raise InvalidParams(field, int(sources.max()) // remote.ratio, f"block ids up to {most}")
    return BlockPairs(here[wanted], sources)


def _by_kernel_block(side: GroupBlocks) -> np.ndarray:
    """The kernel block ids of a side's blocks, −1 where none is held."""
    held = np.repeat(np.asarray(side.ids, dtype=np.int64) != NULL_BLOCK, side.ratio)
    return np.where(held, expand_blocks(side.ids, side.ratio), -1)
