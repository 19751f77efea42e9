"""Request intake: checks the params of a new request and decides how it is served."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvferry.connector.allowed_hosts import TrustedHosts
from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.params_builder import has_tokens, leave_out, prompt_of
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries, Settled, is_ticket
from kvferry.connector.scheduler_side.sessions import Sessions
from kvferry.connector.tracing.scheduler_events import SchedulerTracing
from kvferry.connector.vllm.requests import report_cached_tokens
from kvferry.plan.tokens import held_from
from kvferry.protocol.digests import Prompt, shared_tokens
from kvferry.protocol.errors import ForeignParams, InputError, InvalidParams
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.params import NamedPrefill, RemoteDecode, RemotePrefill
from kvferry.protocol.params_reader import (
    decode_params,
    read_params,
    read_transfer_id,
    read_turn,
    without_transfer,
)
from kvferry.protocol.prompt_queries import request_key
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import RemoteLease
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.lease import LeaseUse
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.producer.prompt_directory import PromptDirectory

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class RequestIntake:
    """Decides how a request is served, once, when it arrives.

    Args:
        trusted: the hosts that params may name.
        asking: for prompts whose producers must be asked.
        directory: prompts that other engines may ask for.
    """

    def __init__(
        self,
        local: LocalEngine,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        counters: Counters,
        trusted: TrustedHosts,
        tracing: SchedulerTracing,
        asking: PromptQueries,
        directory: PromptDirectory,
    ) -> None:
        self._own_leases: dict[str, LeaseName] = {}
        self._sessions = Sessions()
        self._local = local
        self._leases = leases
        self._loads = loads
        self._counters = counters
        self._trusted = trusted
        self._tracing = tracing
        self._asking = asking
        self._directory = directory

    def receive(self, request: Request) -> None:
        """Read the request's params before vLLM does, and remove unusable ones."""
        self._sessions.begun(request)
        try:
            params = read_params(request.kv_transfer_params, request.num_prompt_tokens)
            if isinstance(params, RemoteDecode):
                self._accept_prefill(request)
            elif isinstance(params, NamedPrefill):
                self._accept_named_prompt(request, params)
            elif params is not None:
                self._accept_remote_prompt(request, params)
        except ForeignParams as foreign:
            self._compute_here(request, "foreign_params", str(foreign))
        except InvalidParams as invalid:
            self._compute_here(request, "invalid_params", str(invalid))
        except Exception as error:
            # An exception here would end the engine's input loop. The request is served without a transfer.
            logger.exception("req=%s: an internal error in its params", request.request_id)
            self._compute_here(request, "invalid_params", repr(error))

    def answered(self, settled: Settled, request: Request | None) -> None:
        """A question is settled.

        Args:
            request: None if it has ended.
        """
        answer = settled.answer
        try:
            prompt_tokens = request.num_prompt_tokens if request is not None else None
            params = (
                decode_params(answer.params, prompt_tokens)
                if answer is not None and is_ticket(answer)
                else None
            )
            if request is not None and answer is not None and answer.cached_tokens is not None:
                report_cached_tokens(request, answer.cached_tokens)
            if request is None or not settled.waits:
                if params is not None and self._trusted.allow(params.remote_host):
                    self._loads.decline(params)
            elif params is not None:
                self._accept_remote_prompt(request, params)
            elif settled.is_crowded_out:
                self._compute_here(
                    request, "too_many_queries", "hosts with fewer open questions need the place"
                )
            elif answer is None and settled.unknown_why == "other_prompt":
                self._compute_here(
                    request, "other_prompt", "the producer prefills another one under this id"
                )
            elif answer is None:
                self._compute_here(
                    request, "prompt_unknown", "no producer has said that it prefills it"
                )
            elif answer.reason == "no_lease":
                self._compute_here(
                    request, "no_lease", "the producer had no slot for it, or cannot share it"
                )
            elif self._asking.recomputes:
                self._compute_here(
                    request, "prefill_failed", "the producer's request was aborted or has failed"
                )
            else:
                logger.warning(
                    "req=%s fails: the producer's request was aborted or has failed",
                    request.request_id,
                )
                self._counters.add("failed_requests")
                self._asking.failing.add(request.request_id)
        except Exception as error:
            # As in `receive`: what a peer has sent must not end the engine's loop.
            if not isinstance(error, InputError):
                logger.exception("req=%s: an internal error in its params", settled.request_id)
            if request is not None and settled.waits:
                self._compute_here(request, "invalid_params", str(error))

    def allocated(self, request: Request) -> None:
        """The request has its own references on its blocks."""
        self._release_own(request.request_id)
        for params in self._sessions.go_on(request):
            self._drop_update(request.request_id, params)

    def finished(self, request: Request) -> None:
        """The request is over."""
        self._release_own(request.request_id)
        for params in self._sessions.ended(request):
            self._drop_update(request.request_id, params)

    def _release_own(self, request_id: str) -> None:
        """Release this engine's lease that kept the request's blocks in its cache."""
        name = self._own_leases.pop(request_id, None)
        if name is not None:
            self._leases.release(name)

    def _drop_update(self, request_id: str, raw: object) -> None:
        """Params on a later part of a session's input cannot be used: what they name is given back."""
        try:
            params = read_params(raw)
        except InputError as invalid:
            self._update_computed_here(request_id, str(invalid))
            return
        if isinstance(params, RemoteDecode):
            self._counters.add("prefills_kept")
            logger.info(
                "req=%s cannot be decoded elsewhere: it is a session of streamed input", request_id
            )
            return
        if isinstance(params, RemotePrefill):
            if self._local.is_named_by(params):
                self._leases.release(RemoteLease.of(params).name)
            elif self._local.reads and self._trusted.allow(params.remote_host):
                self._loads.decline(params)
        if params is not None:
            self._update_computed_here(request_id, "vLLM loads a session's first part only")

    def _update_computed_here(self, request_id: str, detail: str) -> None:
        self._counters.add("local_recomputes", "session_update")
        logger.warning(
            "req=%s: a later part of its input is computed here (session_update): %s",
            request_id,
            detail,
        )

    def _accept_prefill(self, request: Request) -> None:
        prompt = prompt_of(request, request.num_prompt_tokens, self._local)
        num_tokens = request.num_prompt_tokens
        is_producer = self._local.is_producer
        can_share = is_producer and not request.resumable and has_tokens(request)
        can_share = can_share and leave_out(request, self._local.left_out)
        is_leased = can_share and self._intend(request, LeaseUse.PROMPT)
        if prompt is not None and self._local.is_read_from:
            key = request_key(request.request_id, read_transfer_id(request.kv_transfer_params))
            self._directory.arrived(request.request_id, key, prompt, num_tokens)
            if not is_leased:
                self._directory.over(
                    request.request_id, "no_lease"
                )  # who asks need not wait for it
        if not is_producer:
            self._compute_here(request, "wrong_role", "this engine is no producer (kv_role)")
        elif not can_share:
            self._counters.add("prefills_kept")
            logger.info(
                "req=%s cannot be decoded elsewhere, and is served without params",
                request.request_id,
            )
        else:
            self._tracing.prefill_arrived(request)
            logger.debug("req=%s is to be decoded elsewhere", request.request_id)
            turn = read_turn(request.kv_transfer_params or {}, num_tokens)
            if turn is not None:
                self._accept_turn(request, turn)

    def _accept_named_prompt(self, request: Request, source: NamedPrefill) -> None:
        """A producer that prefills this prompt now, or has: it is asked for the ticket."""
        prompt = self._prompt_to_compare(request, source, request.num_prompt_tokens)
        confirmed = source.remote_request_id
        if prompt is None:
            return
        if (
            source.transfer_id is None
            and confirmed is not None
            and confirmed not in request.request_id
        ):
            self._compute_here(
                request, "prompt_unknown", f"its id does not contain the producer's, {confirmed!r}"
            )
        elif not self._asking.ask(request, source, prompt):
            self._compute_here(request, "too_many_queries", "too many prompts are being asked for")
        elif request.abort_immediately or request.get_skip_reading_prefix_cache():
            self._asking.finished(request.request_id)  # the ticket is given back when it comes
            self._compute_here(
                request, "not_wanted", "it was rejected, or must not read cached prefixes"
            )

    def _accept_turn(self, request: Request, turn: RemotePrefill) -> None:
        """The router names a decoder that holds the last turn, which this prefill may load."""
        if self._local.is_named_by(turn):
            self._keep_own(request, turn)
        elif not self._may_connect(request, turn.remote_host):
            return
        elif self._local.takes_turns:
            self._accept_remote_prompt(request, turn, is_turn=True)
        else:
            if self._local.is_consumer:
                self._loads.decline(turn)
            self._compute_here(
                request, "turns_off", "bidirectional_kv_xfer is not set on this engine"
            )

    def _keep_own(self, request: Request, source: RemotePrefill) -> None:
        """Prefill and decode are on this engine: the lease's blocks are in the local prefix cache, and no other engine
        reads them. It ends when the request has blocks or is over; until then it protects the prefix hit."""
        if source.kvferry.boot == self._local.boot:
            self._own_leases[request.request_id] = RemoteLease.of(source).name

    def _accept_remote_prompt(
        self, request: Request, source: RemotePrefill, *, is_turn: bool = False, digest: str = ""
    ) -> None:
        """Args:
        digest: of the whole prompt, if it is known: then an equal prompt is not digested again.
        """
        if self._local.is_named_by(source):
            self._keep_own(request, source)
        prompt = self._prompt_to_compare(request, source, source.remote_num_tokens, is_turn=is_turn)
        if prompt is None:
            return
        if request.abort_immediately:
            # The front end rejected this request and passes it on only to have the remote blocks released.
            self._loads.decline(source)
            request.kv_transfer_params = without_transfer(request.kv_transfer_params)
        else:
            shared = source.remote_num_tokens
            if digest != source.kvferry.digests[-1] or shared != request.num_prompt_tokens:
                shared = shared_tokens(prompt, source.kvferry.digests, source.remote_num_tokens)
            self._offer(request, source, shared, is_turn=is_turn)
            if self._local.offers_turns and not is_turn and not request.resumable:
                self._expect_another_turn(request)

    def _prompt_to_compare(
        self,
        request: Request,
        source: NamedPrefill | RemotePrefill,
        num_tokens: int,
        *,
        is_turn: bool = False,
    ) -> Prompt | None:
        """The prompt, to be compared with the producer's; None if it cannot be loaded from there, and is computed here.

        Args:
            num_tokens: as for `prompt_of`.
        """
        prompt = prompt_of(request, num_tokens, self._local)
        if not is_turn and not self._local.is_consumer:
            self._compute_here(request, "wrong_role", "this engine is no consumer (kv_role)")
        elif self._local.is_named_by(source):
            self._compute_here(request, "local_engine", "the params name this engine itself")
        elif self._may_connect(request, source.remote_host):
            if prompt is not None:
                return prompt
            self._compute_here(
                request, "prompt_embeds", "a prompt of embeddings has no tokens to compare"
            )
        return None

    def _may_connect(self, request: Request, host: str) -> bool:
        """Whether the host in the params is allowed. If not, nothing is sent to it: not even a question."""
        why = self._trusted.why_not(host)
        if why is None:
            return True
        self._compute_here(request, "host_not_allowed", why)
        return False

    def _expect_another_turn(self, request: Request) -> None:
        """Record that its answer is offered if it has the remote lease; sibling requests share one response."""
        if self._loads.state(request.request_id) is not None:
            self._intend(request, LeaseUse.TURN)

    def _intend(self, request: Request, use: LeaseUse) -> bool:
        is_intended = self._leases.intend(request.request_id, use)
        if not is_intended:
            logger.warning(
                "req=%s is served without a lease: one by its id has not ended", request.request_id
            )
        return is_intended

    def _offer(
        self, request: Request, source: RemotePrefill, shared: int, *, is_turn: bool
    ) -> None:
        if self._local.is_all_or_nothing and shared < source.remote_num_tokens:
            shared = 0
        elif (
            self._local.needs_whole_prompts
            and source.remote_num_tokens != request.num_prompt_tokens
        ):
            shared = 0  # every token of the producer's depends on where its prompt ends
        elif not self._windows_reach(source, request.num_prompt_tokens):
            self._loads.decline(source)
            self._compute_here(
                request,
                "window_edge",
                "it needs tokens whose blocks the producer, or vLLM here, frees",
            )
            return
        shared = min(shared, request.num_prompt_tokens)
        refused = self._loads.offer(
            request.request_id, source, shared, time.monotonic(), is_turn=is_turn
        )
        if refused is not None:
            self._compute_here(
                request,
                refused,
                f"{source.remote_num_tokens} tokens of req={source.remote_request_id}",
            )
            return
        self._tracing.decode_arrived(request, source, shared)
        logger.debug(
            "req=%s: %d of %d tokens are held by engine %s as req=%s slot=%d",
            request.request_id,
            shared,
            request.num_prompt_tokens,
            source.engine_id,
            source.remote_request_id,
            source.kvferry.lease_slot,
        )

    def _windows_reach(self, source: RemotePrefill, prompt_tokens: int) -> bool:
        num_tokens, reported = source.remote_num_tokens, source.kvferry.held_from
        if len(reported) != len(self._local.groups):
            sides = zip(self._local.block_spans, source.remote_block_ids, strict=False)
            reported = tuple(held_from(span, len(ids), num_tokens) for span, ids in sides)
        return self._local.windows_reach(
            self._local.block_spans, reported, num_tokens, prompt_tokens
        )

    def _compute_here(self, request: Request, reason: str, detail: str) -> None:
        self._counters.add("local_recomputes", reason)
        self._tracing.computed_here(request, reason)
        request.kv_transfer_params = without_transfer(request.kv_transfer_params)
        logger.warning("req=%s is computed here (%s): %s", request.request_id, reason, detail)
