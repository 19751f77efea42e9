"""Offers of this engine's blocks to other engines: when a request's blocks are held, and the params of its answer.

A prompt's blocks are held from the step on that completes it. The workers mark the end of that step, so consumers may
read as soon as the device has finished it, and vLLM can give none of the blocks away, whatever becomes of the request.
A model with recurrent states moves them between blocks when a request ends, so there, as for turns, they are held from
then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.params_builder import ParamsBuilder, has_ended_well
from kvferry.connector.vllm_internals import EngineBlocks, distinct_blocks
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.producer.asked_prompts import AskedPrompts
from kvferry.scheduler.producer.lease import Lease, LeaseUse
from kvferry.scheduler.producer.ledger import ProducerLedger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

_OPENS_WITHIN_S = 10.0
"""The workers get the orders of a step when the one before it has run, if steps overlap; a ticket is given earlier."""

_READ_OR_HELD = ("", "done")
"""`Lease.ended_by` of a lease that has not ended, or that a consumer has read already."""


class Offers:
    """The offers of one engine.

    Args:
        asked: the prompts that other engines may ask for.

    Attributes:
        builder: of the params.
    """

    def __init__(
        self,
        local: LocalEngine,
        leases: ProducerLedger,
        blocks: EngineBlocks,
        builder: ParamsBuilder,
        asked: AskedPrompts,
    ) -> None:
        self.builder = builder
        self._asked = asked
        self._leases = leases
        self._blocks = blocks
        self._holds_early = not any(group.policy == "state" for group in local.groups)
        self._prefilling: dict[str, Request] = {}
        self._built: dict[str, tuple[RemotePrefill, Lease]] = {}

    def opened(self, request: Request) -> None:
        """The request is scheduled, and its lease has a slot."""
        lease = self._leases.running(request.request_id)
        if lease is None:
            self._asked.over(request.request_id, "no_lease")
        is_prefill = lease is not None and lease.use is LeaseUse.PROMPT and request.max_tokens == 1
        if is_prefill and self._holds_early:
            self._prefilling[request.request_id] = request

    def scheduled(self, num_tokens: Mapping[str, int]) -> None:
        """Hold the blocks of the prompts that this step completes.

        Args:
            num_tokens: of each request, in this step.
        """
        completing = [
            request
            for request_id, request in self._prefilling.items()
            if (count := num_tokens.get(request_id))
            and request.num_computed_tokens + count >= request.num_prompt_tokens
        ]
        for request in completing:
            del self._prefilling[request.request_id]
            lease = self._leases.running(request.request_id)
            if lease is not None:
                self._complete(request, lease)

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> RemotePrefill | None:
        """The request has ended: the params of its blocks, which are held; None if they are not."""
        self._prefilling.pop(request.request_id, None)
        if request.request_id in self._built:
            params = self._complete_prompt(request)
        else:
            params = self._finish(request, block_ids)
            if params is not None:
                self._asked.ticket(request.request_id, params.to_json())
        self._asked.over(request.request_id, "" if params is not None else "ended")
        return params

    def _finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> RemotePrefill | None:
        lease = self._leases.running(request.request_id)
        if lease is None:
            return None
        num_tokens = self.builder.num_complete_tokens(request, lease.use)
        params = self.builder.build(request, block_ids, num_tokens, lease, self._leases.lease_s)
        if params is None:
            self._leases.abandon(request.request_id)
        else:
            self._leases.finish(request.request_id, self.builder.worker_blocks(params), distinct_blocks(block_ids))
        return params

    def _complete_prompt(self, request: Request) -> RemotePrefill | None:
        params, lease = self._built.pop(request.request_id)
        self._leases.request_ended(lease)
        if not has_ended_well(request) and not lease.ended_by:
            self._leases.end(lease, "abandoned")
        return params if lease.ended_by in _READ_OR_HELD else None

    def _complete(self, request: Request, lease: Lease) -> None:
        block_ids, num_tokens = self._blocks.table(request.request_id), request.num_prompt_tokens
        params = self.builder.build(request, block_ids, num_tokens, lease, self._leases.lease_s)
        if params is not None:
            self._leases.complete(request.request_id, self.builder.worker_blocks(params), distinct_blocks(block_ids))
            self._built[request.request_id] = params, lease
            self._asked.ticket(request.request_id, params.to_json(opens_within_s=_OPENS_WITHIN_S))
