"""Requests in the order of vLLM's waiting queue, and the blocks that they lack.

The number of blocks comes from the call that vLLM's own admission makes (`KVCacheManager.allocate_slots`, vLLM 0.32),
so groups with a window, a chunk or a recurrent state count as in vLLM. Prefix hits are ignored.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_FIRST = 8
"""Number of waiting requests whose need is counted. vLLM admits in order, so later ones wait for these anyway."""

_NEEDS_BLOCKS = frozenset(
    (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, RequestStatus.PREEMPTED)
)
"""A request is also in one of these after a load, failed or not; while it loads, it has the blocks for that."""

_Place = tuple[int, float, str]


class UnfinishedRequests:
    """This engine's requests, in the order in which vLLM admits them.

    Attributes:
        by_id: all requests, by id.
    """

    def __init__(self, config: VllmConfig) -> None:
        self.by_id: dict[str, Request] = {}
        self._by_priority = config.scheduler_config.policy == "priority"
        self._max_running = config.scheduler_config.max_num_seqs
        self._lookahead = config.num_lookahead_tokens
        self._places: dict[str, _Place] = {}
        self._order: list[_Place] = []

    def add(self, request: Request) -> None:
        """A request has arrived."""
        self.remove(request.request_id)
        priority = request.priority if self._by_priority else 0
        place = (priority, request.arrival_time, request.request_id)
        self.by_id[request.request_id], self._places[request.request_id] = request, place
        insort(self._order, place)

    def remove(self, request_id: str) -> None:
        """A request has ended; unknown ones are ignored."""
        if self.by_id.pop(request_id, None) is not None:
            del self._order[bisect_left(self._order, self._places.pop(request_id))]

    def needs(self, manager: KVCacheManager) -> list[int]:
        """Blocks that each of the first waiting requests lacks, in order. It reads at most as many requests as can run,
        and a few more."""
        first: list[Request] = []
        running = False
        for _, _, request_id in self._order:
            request = self.by_id[request_id]
            running |= request.status is RequestStatus.RUNNING
            if request.status in _NEEDS_BLOCKS:
                first.append(request)
                if len(first) == _FIRST:
                    break
        watermark = manager.watermark_blocks if running else 0
        return [self._lacking(manager, request) + watermark for request in first]

    def most(self, manager: KVCacheManager) -> int:
        """Blocks of the longest possible request, including vLLM's watermark."""
        length, unknown = manager.max_model_len, ""
        most = _ask(manager, unknown, length, length, num_computed=0, prefill_end=length)
        manager.coordinator.free(unknown)  # the call registers the request in some groups, without blocks
        return most + int(manager.watermark_blocks)

    def may_lack_blocks(self) -> bool:
        """Whether a request may be waiting for blocks only: vLLM could run more requests, and no running one is being
        prefilled, which can use up every step. It reads all requests."""
        requests = self.by_id.values()
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        if len(running) >= self._max_running or any(request.is_prefill_chunk for request in running):
            return False
        return any(request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for request in requests)

    def _lacking(self, manager: KVCacheManager, request: Request) -> int:
        """Blocks that the whole sequence lacks, with its lookahead tokens."""
        num_tokens = min(request.num_tokens, manager.max_model_len)
        num_slots = min(num_tokens + self._lookahead, manager.max_model_len)
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        computed = request.num_computed_tokens
        return _ask(manager, request.request_id, num_tokens, num_slots, num_computed=computed, prefill_end=prefill_end)


def _ask(
    manager: KVCacheManager, request_id: str, num_tokens: int, num_slots: int, *, num_computed: int, prefill_end: int
) -> int:
    """The block count of vLLM's own admission, plus a block for each group in `align` mode: there a sequence has the
    blocks of two states while it is computed in steps, but is admitted with one.

    Args:
        num_slots: number of tokens, including those that a draft model writes ahead.
    """
    lacking: int = manager.coordinator.get_num_blocks_to_allocate(
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
    specs = (group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups)
    moving = [spec for spec in specs if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"]
    return lacking + len(moving)
