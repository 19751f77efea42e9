"""The blocks that requests lack, counted as vLLM's scheduler will count them when it admits the request.

While requests wait and vLLM admits none, even if enough blocks are counted as free, admission is *stalled*. The n-th
heartbeat of a stall asks for 2**(n-1) blocks more than are free. So a wrong count starves no request, and few leases
end for a request that does not wait for blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.connector.vllm.requests import is_running, needs_blocks, waits_for_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_FIRST = 8
"""Number of waiting requests whose need is counted. vLLM admits in order, so later ones wait for these anyway."""


class BlockDemand:
    """What the requests of one engine need, now and after every preemption.

    Attributes:
        draft_tokens: tokens of one step of a request with drafts; 0 without them.
    """

    def __init__(
        self, config: VllmConfig, requests: EngineRequests, blocks: EngineBlocks
    ) -> None:
        self._requests = requests
        self._blocks = blocks
        self._max_running = config.scheduler_config.max_num_seqs
        self._lookahead = config.num_lookahead_tokens
        self.draft_tokens = 0
        if config.num_speculative_tokens:
            self.draft_tokens = 1 + config.num_speculative_tokens + self._lookahead
        self._stalled_since_s: float | None = None
        self._stalled_blocks = 1

    def needs(self) -> list[int]:
        """Blocks that each of the first waiting requests lacks, in order."""
        # Running requests are mostly first in the order, so this reads at most as many as can run, and a few more.
        waiting: list[Request] = []
        is_any_running = False
        for entry in self._requests.in_order():
            request = entry.request
            if is_running(request):
                is_any_running = True
            if needs_blocks(request):
                waiting.append(request)
            if len(waiting) == _FIRST:
                break
        # As vLLM: it leaves its watermark free only while something runs.
        watermark = self._blocks.watermark if is_any_running else 0
        return [self.lacking(request) + watermark for request in waiting]

    def lacking(self, request: Request) -> int:
        """Blocks that the whole sequence of a request lacks, with its lookahead tokens."""
        max_tokens = self._blocks.max_model_len
        num_tokens = min(request.num_tokens, max_tokens)
        return self._blocks.lacking(
            request.request_id,
            num_tokens,
            min(num_tokens + self._lookahead, max_tokens),
            num_computed=request.num_computed_tokens,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )

    # Stalls.

    def admitted(self, request: Request) -> None:
        """vLLM has allocated blocks for a request, so admission is not stalled. A preempted one does not count."""
        if not request.num_preemptions:
            self.end_stall()

    def stalled_blocks(self, clock_s: float, heartbeat_s: float) -> int:
        """Blocks that waiting requests are assumed to lack besides the free ones: more than 0 once in a heartbeat.

        The first call begins the stall.
        """
        if self._stalled_since_s is None:
            self._stalled_since_s = clock_s
        if clock_s < self._stalled_since_s + heartbeat_s:
            return 0
        self._stalled_since_s = clock_s
        if not self._may_lack_blocks():
            return 0
        blocks = self._stalled_blocks
        self._stalled_blocks *= 2
        return blocks

    def end_stall(self) -> None:
        """Admission is not stalled: a request was admitted or has ended, or none can lack blocks."""
        self._stalled_since_s = None
        self._stalled_blocks = 1

    def _may_lack_blocks(self) -> bool:
        """True if a request may be waiting for blocks only. It reads all requests."""
        num_running = 0
        is_any_waiting = False
        for entry in self._requests:
            request = entry.request
            if is_running(request):
                num_running += 1
                if request.is_prefill_chunk:
                    return False  # a prefill can use up every step: others wait for its end, not for blocks
            elif waits_for_blocks(request):
                is_any_waiting = True
        return is_any_waiting and num_running < self._max_running
