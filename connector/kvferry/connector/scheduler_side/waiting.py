"""Requests in the order of vLLM's waiting queue, and the blocks that they lack."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from kvferry.connector.vllm_internals import EngineBlocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
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

    While requests wait and vLLM admits none, even if enough blocks are counted as free, admission is *stalled*. The
    first heartbeat of a stall counts as a lack of one block, each further one as a lack of twice as many as the one
    before. So a wrong estimate starves no request, and few leases end for a request that does not wait for blocks.

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
        self._stalled_since_s: float | None = None
        self._stalled_blocks = 1

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
            self.end_stall()

    def admitted(self, request: Request) -> None:
        """vLLM has allocated blocks for a request, so admission is not stalled. Preempted requests do not count."""
        if not request.num_preemptions:
            self.end_stall()

    def needs(self, blocks: EngineBlocks) -> list[int]:
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
        watermark = blocks.watermark if running else 0
        return [self._lacking(blocks, request) + watermark for request in first]

    def stalled_blocks(self, clock_s: float, heartbeat_s: float) -> int:
        """Blocks that waiting requests are assumed to lack besides the free ones: more than 0 once in a heartbeat. The
        first call begins the stall."""
        if self._stalled_since_s is None:
            self._stalled_since_s = clock_s
        if clock_s < self._stalled_since_s + heartbeat_s:
            return 0
        self._stalled_since_s = clock_s
        if not self._may_lack_blocks():
            return 0
        blocks, self._stalled_blocks = self._stalled_blocks, 2 * self._stalled_blocks
        return blocks

    def end_stall(self) -> None:
        """Admission is not stalled."""
        self._stalled_since_s, self._stalled_blocks = None, 1

    def _may_lack_blocks(self) -> bool:
        """Whether a request may be waiting for blocks only: vLLM could run more requests, and no running one is being
        prefilled, which can use up every step. It reads all requests."""
        requests = self.by_id.values()
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        if len(running) >= self._max_running or any(request.is_prefill_chunk for request in running):
            return False
        return any(request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for request in requests)

    def _lacking(self, blocks: EngineBlocks, request: Request) -> int:
        """Blocks that the whole sequence lacks, with its lookahead tokens."""
        num_tokens = min(request.num_tokens, blocks.max_model_len)
        num_slots = min(num_tokens + self._lookahead, blocks.max_model_len)
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        computed = request.num_computed_tokens
        return blocks.lacking(request.request_id, num_tokens, num_slots, num_computed=computed, prefill_end=prefill_end)
