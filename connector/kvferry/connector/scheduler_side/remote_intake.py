"""Remote prompts: compared by digests with what another engine has of them, and offered to the consumer's ledger.

A prompt is loaded from there if this engine may connect to it, if both prompts have tokens to compare, and if the
blocks that it holds reach as far back as this engine's windows and states need. Whatever is wrong, the request is
computed here, counted by reason, and logged.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvferry.connector.allowed_hosts import TrustedHosts
from kvferry.connector.scheduler_side.params_builder import prompt_of
from kvferry.connector.scheduler_side.requests import EngineRequest, SchedulerContext
from kvferry.link.lease_commands import RemoteLease
from kvferry.plan.tokens import held_from
from kvferry.protocol.digests import Prompt, shared_tokens
from kvferry.protocol.params import NamedPrefill, RemotePrefill
from kvferry.protocol.params_reader import without_transfer
from kvferry.scheduler.consumer.remote_prompt import PromptKind
from kvferry.scheduler.producer.lease import LeaseUse

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class RemotePromptIntake:
    """Accepts prompts and turns that params or answers name.

    Args:
        trusted: the hosts that may be named.
    """

    def __init__(self, context: SchedulerContext, trusted: TrustedHosts) -> None:
        self._local = context.local
        self._leases = context.leases
        self._loads = context.loads
        self._counters = context.counters
        self._tracing = context.tracing
        self._trusted = trusted

    def accept(
        self,
        entry: EngineRequest,
        source: RemotePrefill,
        kind: PromptKind = PromptKind.HANDOVER,
    ) -> None:
        """Compare the prompt with what the producer has of it, and offer it to the ledger."""
        request = entry.request
        if self._local.is_named_by(source):
            self.keep_own(entry, source)
        prompt = self.prompt_to_compare(request, source, source.remote_num_tokens, kind)
        if prompt is None:
            return
        if request.abort_immediately:
            # The front end rejected this request and passes it on only to have the remote blocks released.
            self._loads.decline(source)
            request.kv_transfer_params = without_transfer(request.kv_transfer_params)
            return
        shared = shared_tokens(prompt, source.kvferry.digests, source.remote_num_tokens)
        self._offer(request, source, shared, kind)
        is_handover = kind is PromptKind.HANDOVER
        if self._local.offers_turns and is_handover and not request.resumable:
            self._expect_another_turn(request)

    def prompt_to_compare(
        self,
        request: Request,
        source: NamedPrefill | RemotePrefill,
        num_tokens: int,
        kind: PromptKind = PromptKind.HANDOVER,
    ) -> Prompt | None:
        """The prompt, to be compared with the producer's; None if it cannot be loaded from there, and is computed here.

        Args:
            num_tokens: as for `prompt_of`.
        """
        if kind is PromptKind.HANDOVER and not self._local.is_consumer:
            self.compute_here(
                request, "wrong_role", "this engine is no consumer (kv_role)"
            )
            return None
        if self._local.is_named_by(source):
            self.compute_here(
                request, "local_engine", "the params name this engine itself"
            )
            return None
        if not self.may_connect(request, source):
            return None
        prompt = prompt_of(request, num_tokens, self._local)
        if prompt is None:
            detail = "a prompt of embeddings has no tokens to compare"
            self.compute_here(request, "prompt_embeds", detail)
        return prompt

    def may_connect(
        self, request: Request, source: NamedPrefill | RemotePrefill
    ) -> bool:
        """True if the host in the params is allowed. If not, nothing is sent to it: not even a query."""
        if source.remote_engine_id is None:
            why_not = self._trusted.why_not_unannounced(source.remote_host)
        else:
            why_not = self._trusted.why_not(source.remote_host)
        if why_not is None:
            return True
        self.compute_here(request, "host_not_allowed", why_not)
        return False

    def keep_own(self, entry: EngineRequest, source: RemotePrefill) -> None:
        """Prefill and decode are on this engine: the lease's blocks are in its prefix cache, nobody else reads them.

        The lease protects the prefix hit, so it ends when the request has blocks of its own or is over.
        """
        if source.kvferry.boot == self._local.memory.boot:
            entry.own_lease = RemoteLease.from_params(source).name

    def compute_here(self, request: Request, reason: str, detail: str) -> None:
        """Serve the request without a transfer; the reason is a label of metrics."""
        self._counters.add("local_recomputes", reason)
        self._tracing.computed_here(request, reason)
        request.kv_transfer_params = without_transfer(request.kv_transfer_params)
        logger.warning(
            "req=%s is computed here (%s): %s", request.request_id, reason, detail
        )

    def intend(self, request: Request, use: LeaseUse) -> bool:
        """Have the request get a lease when it is scheduled. False if it cannot."""
        is_intended = self._leases.intend(request.request_id, use)
        if not is_intended:
            logger.warning(
                "req=%s is served without a lease: a lease with its id has not ended",
                request.request_id,
            )
        return is_intended

    def _expect_another_turn(self, request: Request) -> None:
        """Record that its answer is offered, if the request has the remote lease."""
        # Sibling requests (`n > 1`) share one response, which has room for the params of one.
        if self._loads.state(request.request_id) is not None:
            self.intend(request, LeaseUse.TURN)

    def _offer(
        self,
        request: Request,
        source: RemotePrefill,
        num_shared: int,
        kind: PromptKind,
    ) -> None:
        is_all_or_nothing = self._local.is_all_or_nothing
        ends_elsewhere = source.remote_num_tokens != request.num_prompt_tokens
        if is_all_or_nothing and num_shared < source.remote_num_tokens:
            num_shared = 0
        elif self._local.needs_whole_prompts and ends_elsewhere:
            # Every token of the producer's depends on where its prompt ends.
            num_shared = 0
        elif not self._windows_reach(source, request.num_prompt_tokens):
            self._loads.decline(source)
            detail = "it needs tokens whose blocks the producer, or vLLM here, frees"
            self.compute_here(request, "window_edge", detail)
            return
        num_shared = min(num_shared, request.num_prompt_tokens)
        refused = self._loads.offer(
            request.request_id, source, num_shared, time.monotonic(), kind=kind
        )
        if refused is not None:
            detail = (
                f"{source.remote_num_tokens} tokens of req={source.remote_request_id}"
            )
            self.compute_here(request, refused, detail)
            return
        self._tracing.decode_arrived(request, source, num_shared)
        logger.debug(
            "req=%s: %d of %d tokens are held by engine %s as req=%s slot=%d",
            request.request_id,
            num_shared,
            request.num_prompt_tokens,
            source.engine_id,
            source.remote_request_id,
            source.kvferry.lease_slot,
        )

    def _windows_reach(self, source: RemotePrefill, prompt_tokens: int) -> bool:
        """True if this engine's windows and states find all tokens that they need in what the producer holds."""
        num_tokens = source.remote_num_tokens
        first_held = source.kvferry.held_from
        if len(first_held) != len(self._local.groups):
            # A producer of an earlier version does not tell: then from the number of its blocks.
            groups = zip(self._local.block_spans, source.remote_block_ids, strict=False)
            first_held = tuple(
                held_from(span, len(ids), num_tokens) for span, ids in groups
            )
        return self._local.windows_reach(
            self._local.block_spans, first_held, num_tokens, prompt_tokens
        )
