"""The KV cache blocks of this process's engine, in vLLM's block pool.

vLLM gives a connector its KV cache manager (`bind_kv_cache_manager`), but declares none of its members as an API
(v1/core/kv_cache_manager.py, v1/core/block_pool.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvferry.connector.vllm.version import AS_TESTED
from kvferry.protocol.errors import LocalProtocolError, UnsupportedVllm

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class EngineBlocks:
    """The KV cache blocks of this process's engine, in vLLM's block pool.

    Attributes:
        num_blocks: blocks of the pool, with the null block (0); 0 until `bind`.
        longest: blocks of the longest possible request, with vLLM's watermark; None if they cannot be counted.
    """

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self.num_blocks = 0
        self.longest: int | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's KV cache manager, and try what is used of it.

        A pool that does not keep blocks out would give them to another request while a consumer reads them. So that is
        tried before the first lease. The count of needed blocks is only used to evict leases, and leases end without
        it, so its lack is no error.

        Raises:
            UnsupportedVllm: blocks cannot be kept out of the pool.
        """
        try:
            _try_references(manager)
            self.num_blocks = int(manager.block_pool.num_gpu_blocks)
        except Exception as error:
            raise UnsupportedVllm(
                "KVCacheManager.block_pool", repr(error), AS_TESTED
            ) from error
        self._manager = manager
        try:
            self.longest = self._count_longest(manager)
        except Exception as error:  # noqa: BLE001 - vLLM's internals may differ
            self.longest = None
            logger.warning(
                "lease eviction disabled: this vLLM does not count the blocks of a request (%r)",
                error,
            )

    @property
    def num_free(self) -> int:
        """Blocks in the pool without a reference."""
        return int(self._bound.block_pool.get_num_free_blocks())

    def reference_count(self, block: int) -> int:
        """References to a block, those of `keep` included."""
        return int(self._bound.block_pool.blocks[block].ref_cnt)

    def table(self, request_id: str) -> tuple[list[int], ...]:
        """The block table of a request: a list of blocks per cache group."""
        return tuple(self._bound.get_block_ids(request_id))

    def loaded_into(self, request_id: str) -> tuple[int, ...]:
        """The blocks that a load of this request writes, each once: those that are in no prefix cache.

        vLLM caches a load's blocks when the load has ended well. So the cached ones are the request's local prefix hit,
        which other requests may use at any time.
        """
        groups = self._bound.get_blocks(request_id).get_unhashed_block_ids_all_groups()
        return tuple(dict.fromkeys(chain.from_iterable(groups)))

    def keep(self, blocks: Sequence[int]) -> None:
        """Add a reference on each block, which keeps it out of the pool."""
        # `touch` counts a reference and takes a free block out of the queue (v1/core/block_pool.py:752): what vLLM does
        # itself for a prefix hit. To the pool a kept block is one that has one more user.
        pool = self._bound.block_pool
        pool.touch(self._objects(pool, blocks))

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each."""
        # In vLLM's order (`KVCacheManager.free`): the end of a sequence is reused before its beginning, so that the
        # prefixes that more prompts share stay in the prefix cache for longer.
        pool = self._bound.block_pool
        pool.free_blocks(self._objects(pool, reversed(blocks)))

    def free(self, request: Request) -> None:
        """Free the blocks of a request before vLLM does; then vLLM finds none."""
        self._bound.free(request)

    def forget_hits(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix cache: no later prompt hits them. Requests that have them keep them."""
        # The numbers come from a worker's report: a number outside the pool would raise within vLLM's step.
        known = {block for block in blocks if 0 <= block < self.num_blocks}
        self._bound.evict_blocks(known)

    def forget_after(self, request: Request, num_tokens: int) -> None:
        """Take every block that has the hash of a part of this request after so many tokens out of the prefix cache."""
        manager = self._bound
        pool = manager.block_pool
        cached = pool.cached_block_hash_to_block
        for block_hash in request.block_hashes[num_tokens // pool.hash_block_size :]:
            for group in range(len(manager.kv_cache_config.kv_cache_groups)):
                key = make_block_hash_with_group_id(block_hash, group)
                # Several blocks may have it. Some of another request may be sound: it costs that they are not hit.
                while (block := cached.get_one_block(key)) is not None:
                    manager.evict_blocks({block.block_id})

    @property
    def watermark(self) -> int:
        """Blocks that vLLM leaves free when it admits a request beside running ones."""
        return int(self._bound.watermark_blocks)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest possible request."""
        return int(self._bound.max_model_len)

    def lacking(
        self,
        request_id: str,
        num_tokens: int,
        num_slots: int,
        *,
        num_computed: int,
        prefill_end: int,
    ) -> int:
        """Blocks that a request lacks. Prefix hits are ignored.

        Args:
            num_tokens: length of the sequence.
            num_slots: number of tokens, including those that a draft model writes ahead.
        """
        # The call that vLLM's own admission makes (`allocate_slots`, v1/core/kv_cache_manager.py:526), so that groups
        # with a window, a chunk or a recurrent state count as they do there. A count by lengths alone is wrong for all
        # of these.
        manager = self._bound
        lacking = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request_id,
            num_tokens=num_slots,
            new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_computed,
            num_local_computed_tokens=num_computed,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
            prefill_end=prefill_end,
        )
        # In `align` mode a sequence has the blocks of two states while it is computed in steps, but is admitted with
        # one.
        num_aligned = 0
        for group in manager.kv_cache_config.kv_cache_groups:
            if getattr(group.kv_cache_spec, "mamba_cache_mode", None) == "align":
                num_aligned += 1
        return int(lacking) + num_aligned

    def num_covering(self, num_tokens: int) -> int:
        """Blocks for so many tokens in every cache group."""
        sizes = [
            manager.block_size
            for manager in self._bound.coordinator.single_type_managers
        ]
        return sum(-(-num_tokens // size) for size in sizes)

    def _count_longest(self, manager: KVCacheManager) -> int:
        length = self.max_model_len
        unknown_id = ""  # no request of vLLM has it
        longest = self.lacking(
            unknown_id, length, length, num_computed=0, prefill_end=length
        )
        # The call registers the request in some groups, without blocks.
        manager.coordinator.free(unknown_id)
        return longest + self.watermark

    @staticmethod
    def _objects(pool: BlockPool, blocks: Iterable[int]) -> list[KVCacheBlock]:
        # Without a Python loop: one request may have 10,000 blocks, and this is the engine's step.
        return list(map(pool.blocks.__getitem__, blocks))

    @property
    def _bound(self) -> KVCacheManager:
        if self._manager is None:
            raise LocalProtocolError("vLLM has not bound its KV cache manager")
        return self._manager


def distinct_blocks(block_ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Every block of a request once, without the null block (0).

    vLLM puts that one in the place of blocks that have left a window.
    """
    is_one_full_group = len(block_ids) == 1 and all(block_ids[0])
    if is_one_full_group:
        # Nearly every model: nothing to look for, and this is called once per lease in the engine's step.
        return tuple(block_ids[0])
    return tuple(dict.fromkeys(filter(None, chain.from_iterable(block_ids))))


def _try_references(manager: KVCacheManager) -> None:
    """Keep a free block and give it back. Raises any exception if the pool differs from the tested one."""
    pool = manager.block_pool
    num_free = pool.get_num_free_blocks()
    # The first free block: it goes back to the front of the queue, so the pool is as it was.
    for block in pool.blocks[:2]:
        if block.ref_cnt == 0 and not block.is_null:
            _try_reference(manager, block, num_free)
            break
    # Used when a load has failed.
    _ = manager.free
    _ = manager.get_blocks("").get_unhashed_block_ids_all_groups()
    if pool.get_num_free_blocks() != num_free or manager.get_block_ids("") is None:
        raise ValueError("a block that was given back is not free")


def _try_reference(manager: KVCacheManager, block: KVCacheBlock, num_free: int) -> None:
    pool = manager.block_pool
    pool.touch([block])
    if (block.ref_cnt, pool.get_num_free_blocks()) != (1, num_free - 1):
        raise ValueError("a block with a reference is still free")
    pool.free_blocks([block])
