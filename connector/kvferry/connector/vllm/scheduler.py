"""What kvferry uses of vLLM's scheduler: the KV cache blocks of its pool, and its requests (v1/request.py).

vLLM gives a connector its KV cache manager (`bind_kv_cache_manager`), but declares none of its members as an API
(v1/core/kv_cache_manager.py, v1/core/block_pool.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus

from kvferry.connector.vllm.version import AS_TESTED
from kvferry.protocol.errors import LocalProtocolError, UnsupportedVllm

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class EngineBlocks:
    """The KV cache blocks of this process's engine, in vLLM's block pool.

    Its methods are for an engine that is bound; before that they raise `LocalProtocolError`.

    Attributes:
        num_blocks: blocks of the pool, with the null block (0); 0 until `bind`.
        longest: blocks of the longest possible request, with vLLM's watermark; None if they cannot be counted.
        watermark: blocks that vLLM leaves free when it admits a request beside running ones.
        max_model_len: tokens of the longest possible request.
    """

    def __init__(self) -> None:
        self._manager: KVCacheManager = _NoManager()
        self.num_blocks = 0
        self.longest: int | None = None
        self.watermark = 0
        self.max_model_len = 0

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
        return int(self._manager.block_pool.get_num_free_blocks())

    def reference_count(self, block: int) -> int:
        """References to a block, those of `keep` included."""
        return int(self._manager.block_pool.blocks[block].ref_cnt)

    def table(self, request_id: str) -> tuple[list[int], ...]:
        """The block table of a request: a list of blocks per cache group."""
        return tuple(self._manager.get_block_ids(request_id))

    def loaded_into(self, request_id: str) -> tuple[int, ...]:
        """The blocks that a load of this request writes, each once: those that are in no prefix cache.

        vLLM caches a load's blocks when the load has ended well. So the cached ones are the request's local prefix hit,
        which other requests may use at any time.
        """
        groups = self._manager.get_blocks(
            request_id
        ).get_unhashed_block_ids_all_groups()
        return tuple(dict.fromkeys(chain.from_iterable(groups)))

    def keep(self, blocks: Sequence[int]) -> None:
        """Add a reference on each block, which keeps it out of the pool."""
        # `touch` counts a reference and takes a free block out of the queue (v1/core/block_pool.py:752): what vLLM does
        # itself for a prefix hit. To the pool a kept block is one that has one more user.
        # No Python loop: one request may have 10,000 blocks, and this is the engine's step.
        pool = self._manager.block_pool
        pool.touch(list(map(pool.blocks.__getitem__, blocks)))

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each."""
        # In vLLM's order (`KVCacheManager.free`): the end of a sequence is reused before its beginning, so that the
        # prefixes that more prompts share stay in the prefix cache for longer.
        pool = self._manager.block_pool
        pool.free_blocks(list(map(pool.blocks.__getitem__, reversed(blocks))))

    def free(self, request: Request) -> None:
        """Free the blocks of a request before vLLM does; then vLLM finds none."""
        self._manager.free(request)

    def forget_hits(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix cache: no later prompt hits them. Requests that have them keep them."""
        # The numbers come from a worker's report: a number outside the pool would raise within vLLM's step.
        known = {block for block in blocks if 0 <= block < self.num_blocks}
        self._manager.evict_blocks(known)

    def forget_after(self, request: Request, num_tokens: int) -> None:
        """Take every block that has the hash of a part of this request after so many tokens out of the prefix cache."""
        manager = self._manager
        pool = manager.block_pool
        cached = pool.cached_block_hash_to_block
        for block_hash in request.block_hashes[num_tokens // pool.hash_block_size :]:
            for group in range(len(manager.kv_cache_config.kv_cache_groups)):
                key = make_block_hash_with_group_id(block_hash, group)
                # Several blocks may have it. Some of another request may be sound: it costs that they are not hit.
                while (block := cached.get_one_block(key)) is not None:
                    manager.evict_blocks({block.block_id})

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
        manager = self._manager
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
            for manager in self._manager.coordinator.single_type_managers
        ]
        return sum(-(-num_tokens // size) for size in sizes)

    def _count_longest(self, manager: KVCacheManager) -> int:
        self.watermark = int(manager.watermark_blocks)
        self.max_model_len = int(manager.max_model_len)
        length = self.max_model_len
        unknown_id = ""  # no request of vLLM has it
        longest = self.lacking(
            unknown_id, length, length, num_computed=0, prefill_end=length
        )
        # The call registers the request in some groups, without blocks.
        manager.coordinator.free(unknown_id)
        return longest + self.watermark


class _NoManager:
    """Stands for vLLM's KV cache manager as long as there is none."""

    def __getattr__(self, name: str) -> NoReturn:
        raise LocalProtocolError(
            f"KVCacheManager.{name} is used before vLLM has bound its KV cache manager"
        )


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


_WAITS_FOR_BLOCKS = frozenset((RequestStatus.WAITING, RequestStatus.PREEMPTED))

_PARKED = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

_NEEDS_BLOCKS = _WAITS_FOR_BLOCKS | {_PARKED}

_ENDED_WELL = frozenset(
    (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_REPETITION,
    )
)


def hint_actions(request: Request) -> Sequence[object]:
    """The actions of the request's KV hints; none for a vLLM that has no hints."""
    hints = getattr(request, "kv_hints", None)
    return () if hints is None else hints.actions


# Status.


def is_running(request: Request) -> bool:
    """True if vLLM computes the request in its steps."""
    return request.status is RequestStatus.RUNNING


def waits_for_blocks(request: Request) -> bool:
    """True if vLLM admits the request as soon as its blocks are free and the connector lets it."""
    return request.status in _WAITS_FOR_BLOCKS


def needs_blocks(request: Request) -> bool:
    """True if the request waits without blocks, parked or not, or for its grammar.

    A request is also in one of these states after a load, failed or not. While it loads, it has the blocks for that.
    """
    return request.status in _NEEDS_BLOCKS


def waits_for_load(request: Request) -> bool:
    """True if vLLM believes that a load of the request is in flight: until it looks at the request after the end."""
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def has_ended_well(request: Request) -> bool:
    """True if the request's answer is complete: neither aborted nor failed."""
    return request.status in _ENDED_WELL


def has_ended_by_error(request: Request) -> bool:
    """True if the request has ended because vLLM could not go on with it."""
    return request.status is RequestStatus.FINISHED_ERROR


# Parking.
#
# No connector can have a waiting request skipped before its prefix is looked up. But vLLM skips one whose grammar is
# not compiled yet: `Scheduler._handle_blocked_waiting_request` (v1/core/sched/scheduler.py:3191) returns False before
# the lookup for as long as a request with that status has no compiled grammar, so for ever if it has none at all. A
# request that ends is removed from its queue in any status.


def can_park(request: Request) -> bool:
    """True if `park` is possible: the request waits, and not for a grammar of its own, which would end the parking."""
    return (
        request.structured_output_request is None
        and request.status is RequestStatus.WAITING
    )


def park(request: Request) -> None:
    """Have vLLM skip a waiting request from now on, before it looks up its prefix."""
    request.status = _PARKED


def unpark(request: Request) -> None:
    """Have vLLM look at the request again; no-op if it has ended."""
    if request.status is _PARKED:
        request.status = RequestStatus.WAITING


# A prompt whose last tokens are left out.


def cut_prompt(request: Request, num_tokens: int) -> None:
    """Shorten the prompt of a request that was not scheduled yet to its first `num_tokens` tokens.

    Every copy of the prompt that `Request.__init__` makes (v1/request.py:142-232) is cut: the prompt, all tokens, which
    the view `all_token_ids` shows, and the hashes of blocks.

    Raises:
        LocalProtocolError: the prompt has no tokens.
    """
    prompt = request.prompt_token_ids
    if prompt is None:
        raise LocalProtocolError(f"req={request.request_id} has a prompt of embeddings")
    num_removed = len(prompt) - num_tokens
    # A copy: samples of one prompt share the list.
    request.prompt_token_ids = prompt[:num_tokens]
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens
    # Hashes that include removed tokens: at most one a token, since a block has at least one.
    first_removed = max(0, len(request.block_hashes) - num_removed)
    del request.block_hashes[first_removed:]
    request.update_block_hashes()


# Usage.


def cached_tokens_of(request: Request) -> int | None:
    """The prompt's tokens that were in this engine's cache when the request was first scheduled.

    None if this vLLM does not tell, or the request has had its first token: then vLLM has sent the counts
    (`Request.take_prefill_stats`, v1/core/sched/scheduler.py:2208).
    """
    stats = getattr(request, "prefill_stats", None)
    cached = getattr(stats, "num_cached_tokens", None)
    if not isinstance(cached, int):
        return None
    return cached


def local_hit_of(request: Request) -> int:
    """The tokens of a request that this engine's own cache had when it was last looked up; 0 if vLLM does not tell.

    More than vLLM has told the connector, if the hit ends within a block (`prefix_match_unit`): it asks for what is
    after the last whole block, and then takes whichever is longer (v1/core/sched/scheduler.py:1005).
    """
    stats = getattr(request, "prefill_stats", None)
    hit = getattr(stats, "num_local_cached_tokens", None)
    return hit if isinstance(hit, int) else 0


class _ReportedStats(PrefillStats):
    """A request's `PrefillStats` that report another number of cached tokens when they are complete.

    The number is replaced in `finalize`, not at once: vLLM sets the counts again after a load that has failed
    (v1/core/sched/scheduler.py:1077), and completes them just before it sends them (:2210). The number of tokens that
    are new in the cache is derived from the true count before that, as in a sequential handover.
    """

    cached_elsewhere: int

    def finalize(self, num_cached_tokens: int) -> None:
        super().finalize(num_cached_tokens)
        self.num_cached_tokens = min(self.cached_elsewhere, self.num_prompt_tokens)


def report_cached_tokens(request: Request, cached_tokens: int) -> None:
    """Have a response's usage report as many cached tokens as the producer had, instead of what was loaded from it.

    In a sequential handover vLLM's front end reads the number in the params of the request when it arrives. With both
    legs at once it comes later, and the engine has no other way to the front end than a request's own counts.
    """
    counted = getattr(request, "prefill_stats", None)
    # Not `isinstance`: the counts may be replaced already, and another vLLM's subclass may count something else.
    if type(counted) is PrefillStats:
        reported = _ReportedStats(**vars(counted))
        reported.cached_elsewhere = cached_tokens
        request.prefill_stats = reported
