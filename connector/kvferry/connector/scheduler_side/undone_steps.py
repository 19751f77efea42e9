"""Steps that vLLM undoes while it schedules: by priority it may preempt a request that it has scheduled already.

vLLM gives blocks their hashes when it schedules the step that fills them, and such a request is taken out of the step
again. Its blocks are free then and keep the hashes, although nothing has written them: the request itself hits them
when it is resumed, and so does every other one with its prompt (vllm#57580). The answers are wrong, here and on every
engine that reads the prompt from here. So those hashes are taken out of the prefix cache in the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.vllm.blocks import EngineBlocks


class UndoneSteps:
    """Takes what undone steps would have computed out of the prefix cache.

    Args:
        may_undo: whether vLLM may preempt a request that it has scheduled, see `facts.caches_uncomputed_blocks`.
    """

    def __init__(
        self, requests: EngineRequests, blocks: EngineBlocks, *, may_undo: bool
    ) -> None:
        self._requests = requests
        self._blocks = blocks
        self._may_undo = may_undo

    def scheduled(
        self, num_tokens: Mapping[str, int], preempted: Collection[str]
    ) -> None:
        """A step was scheduled.

        Args:
            num_tokens: of each request, in this step.
            preempted: requests whose blocks were freed since the last step.
        """
        if not self._may_undo:
            return
        for request_id in preempted:
            entry = self._requests.find(request_id)
            if entry is not None:
                # vLLM does not say whether it had scheduled the request. If not, it had hashed nothing more either.
                self._blocks.forget_after(entry.request, entry.num_scheduled)
                entry.num_scheduled = 0
        for request_id, num_new in num_tokens.items():
            entry = self._requests.find(request_id)
            if entry is not None:
                request = entry.request
                # Drafts count as scheduled, but only tokens that are certain are hashed.
                entry.num_scheduled = min(
                    request.num_computed_tokens + num_new, request.num_tokens
                )
