"""Request intake: checks the params of a new request and decides how it is served.

    do_remote_decode, or            a prefill for another engine: it is to have a lease; a turn's source may be named,
      remote_decoder                or one of its prefix, see `prefixes.py`
    do_remote_prefill with blocks   a remote prompt, see `RemotePromptIntake`
    do_remote_prefill without, or   a named prompt: its producer is asked for the ticket, see `answered`
      remote_prefiller
    none                            computed here; its prefix may be read from elsewhere
    foreign ones                    served without a transfer

A remote prompt is compared by digests with what another engine has of it. It is loaded from there if this engine may
connect to it, if both prompts have tokens to compare, and if the blocks that it holds reach as far back as this
engine's windows and states need.

Whatever is wrong with params, the request is served: computed here, counted by reason, and logged.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.prefixes import PrefixIntake
from kvferry.connector.scheduler_side.prompt_queries import (
    PromptQueries,
    Settled,
    is_ticket,
)
from kvferry.connector.scheduler_side.requests import EngineRequest, SchedulerContext
from kvferry.connector.scheduler_side.sessions import Session
from kvferry.connector.vllm.scheduler import (
    cut_prompt,
    report_cached_tokens,
)
from kvferry.link.allowed_hosts import TrustedHosts
from kvferry.link.commands import RemoteLease
from kvferry.plan.blocks import held_from
from kvferry.protocol.digests import Prompt, UncoveredToken, shared_tokens
from kvferry.protocol.errors import ForeignParams, InputError, InvalidParams
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.params import (
    NamedPrefill,
    RemoteDecode,
    RemotePrefill,
    decode_params,
    read_params,
    read_transfer_id,
    read_turn,
    request_key,
    without_transfer,
)
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from kvferry.scheduler.requests import LeaseUse, PromptKind

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class RequestIntake:
    """Decides how a request is served, once, when it arrives.

    Args:
        trusted: the hosts that params may name.
        remote: for prompts of which other engines hold the blocks.
        queries: for prompts whose producers must be asked.
        directory: prompts that other engines may ask for.
        pulls: asks for the beginnings of the prompts that are computed here.
    """

    def __init__(
        self,
        context: SchedulerContext,
        trusted: TrustedHosts,
        remote: RemotePromptIntake,
        queries: PromptQueries,
        directory: PromptDirectory,
        pulls: PrefixIntake,
    ) -> None:
        self._context = context
        self._trusted = trusted
        self._remote = remote
        self._queries = queries
        self._directory = directory
        self._pulls = pulls
        self._bugs = RateLimitedLog(logger)

    def receive(self, entry: EngineRequest) -> None:
        """Read the request's params before vLLM does, and remove unusable ones."""
        request = entry.request
        if request.resumable:
            entry.session = Session(request)
        try:
            most_tokens = request.num_prompt_tokens
            if request.abort_immediately:
                # vLLM's front end has put one token in the place of a prompt that it has rejected, often because it is
                # too long. Its params list all of the producer's blocks.
                most_tokens = max(most_tokens, self._context.blocks.max_model_len)
            params = read_params(request.kv_transfer_params, most_tokens)
            if isinstance(params, RemoteDecode):
                may_pull = self._accept_prefill(entry)
                if may_pull and self._context.local.asks_prefixes:
                    self._pulls.arrived(entry)
            elif isinstance(params, NamedPrefill):
                self._accept_named_prompt(entry, params)
            elif params is not None:
                self._remote.accept(entry, params)
            elif self._context.local.asks_prefixes:
                self._pulls.arrived(entry)
        except ForeignParams as foreign:
            self._remote.compute_here(request, "foreign_params", str(foreign))
        except (InvalidParams, UncoveredToken) as invalid:
            self._remote.compute_here(request, "invalid_params", str(invalid))
        except Exception as error:  # noqa: BLE001 - shown, with its traceback
            # An exception here would end the engine's input loop. The request is served without a transfer.
            self._bugs.exception(
                "req=%s: an internal error in its params", request.request_id
            )
            self._remote.compute_here(request, "invalid_params", repr(error))

    def answered(self, settled: Settled, entry: EngineRequest | None) -> None:
        """A query is settled.

        Args:
            entry: None if the request has ended.
        """
        try:
            if entry is None or not settled.waits:
                self._return_ticket(settled, entry)
            else:
                self._apply_answer(settled, entry)
        except Exception as error:  # noqa: BLE001 - shown, with its traceback
            # As in `receive`: what a peer has sent must not end the engine's loop.
            if not isinstance(error, InputError):
                self._bugs.exception(
                    "req=%s: an internal error in its params", settled.request_id
                )
            if entry is not None and settled.waits:
                self._remote.compute_here(entry.request, "invalid_params", str(error))

    def admitted(self, entry: EngineRequest) -> None:
        """A session, or a request with an own lease, has its own references on its blocks."""
        if entry.own_lease is not None:
            self._release_own(entry, entry.own_lease)
        if entry.session is not None:
            for params in entry.session.take_new_params(entry.request):
                self._drop_update(entry.request_id, params)

    def ended(self, entry: EngineRequest) -> None:
        """A session, or a request with an own lease, has ended."""
        if entry.own_lease is not None:
            self._release_own(entry, entry.own_lease)
        if entry.session is not None:
            for params in entry.session.take_last_params(entry.request):
                self._drop_update(entry.request_id, params)

    # Answers.

    def _return_ticket(self, settled: Settled, entry: EngineRequest | None) -> None:
        """Nobody waits for this answer: a ticket in it is given back, so that its producer does not hold the blocks."""
        prompt_tokens = entry.request.num_prompt_tokens if entry is not None else None
        params = _ticket_in(settled, prompt_tokens)
        if params is not None and self._trusted.allow(params.remote_host):
            self._context.loads.decline(params)

    def _apply_answer(self, settled: Settled, entry: EngineRequest) -> None:
        """The request loads with the ticket, is computed here, or fails."""
        request = entry.request
        answer = settled.answer
        params = _ticket_in(settled, request.num_prompt_tokens)
        if answer is not None and answer.cached_tokens is not None:
            report_cached_tokens(request, answer.cached_tokens)
        if params is not None:
            self._remote.accept(entry, params)
        elif settled.is_crowded_out:
            detail = "hosts with fewer open queries need the place"
            self._remote.compute_here(request, "too_many_queries", detail)
        elif answer is None and settled.unknown_why == "other_prompt":
            detail = "the producer prefills another one under this id"
            self._remote.compute_here(request, "other_prompt", detail)
        elif answer is None:
            detail = "no producer has said that it prefills it"
            self._remote.compute_here(request, "prompt_unknown", detail)
        elif answer.reason == "no_lease":
            detail = "the producer had no slot for it, or cannot share it"
            self._remote.compute_here(request, "no_lease", detail)
        elif self._queries.recomputes:
            detail = "the producer's request was aborted or has failed"
            self._remote.compute_here(request, "prefill_failed", detail)
        else:
            logger.warning(
                "req=%s fails: the producer's request was aborted or has failed",
                entry.request_id,
            )
            self._context.counters.add("failed_requests")
            self._queries.fail(entry)

    # This engine's own leases, and later parts of sessions.

    def _release_own(self, entry: EngineRequest, own_lease: LeaseName) -> None:
        self._context.leases.release(own_lease)
        entry.own_lease = None

    def _drop_update(self, request_id: str, raw: object) -> None:
        """Params on a later part of a session's input cannot be used: what they name is given back."""
        try:
            params = read_params(raw)
        except InputError as invalid:
            self._update_computed_here(request_id, str(invalid))
            return
        if isinstance(params, RemoteDecode):
            self._context.counters.add("prefills_kept")
            logger.info(
                "req=%s cannot be decoded elsewhere: it is a session of streamed input",
                request_id,
            )
            return
        if isinstance(params, RemotePrefill):
            if self._context.local.is_named_by(params):
                self._context.leases.release(RemoteLease.from_params(params).name)
            elif self._context.local.reads and self._trusted.allow(params.remote_host):
                self._context.loads.decline(params)
        if params is not None:
            self._update_computed_here(
                request_id, "vLLM loads a session's first part only"
            )

    def _update_computed_here(self, request_id: str, detail: str) -> None:
        self._context.counters.add("local_recomputes", "session_update")
        logger.warning(
            "req=%s: a later part of its input is computed here (session_update): %s",
            request_id,
            detail,
        )

    # Prefills for other engines.

    def _accept_prefill(self, entry: EngineRequest) -> bool:
        """Prefill it for another engine. Returns whether its beginning may be read from elsewhere: no turn is."""
        request = entry.request
        # Before the last tokens are left out: a consumer queries the prompt with all of it.
        num_tokens = request.num_prompt_tokens
        prompt = self._context.local.prompt_of(request, num_tokens)
        # A prompt of embeddings has no tokens by which a consumer could know it.
        can_share = prompt is not None and self._can_share(request)
        is_leased = can_share and self._remote.intend(request, LeaseUse.PROMPT)
        if prompt is not None and self._context.local.is_read_from:
            key = request_key(
                request.request_id, read_transfer_id(request.kv_transfer_params)
            )
            self._directory.arrived(request.request_id, key, prompt, num_tokens)
            if not is_leased:
                # Consumers that query it need not wait.
                self._directory.over(request.request_id, "no_lease")
        if not self._context.local.is_producer:
            self._remote.compute_here(
                request, "wrong_role", "this engine is no producer (kv_role)"
            )
            return False
        if not can_share:
            self._context.counters.add("prefills_kept")
            logger.info(
                "req=%s cannot be decoded elsewhere, and is served without params",
                request.request_id,
            )
            return True
        if self._context.tracing is not None:
            self._context.tracing.prefill_arrived(request)
        logger.debug("req=%s is to be decoded elsewhere", request.request_id)
        turn = read_turn(request.kv_transfer_params or {}, num_tokens)
        if turn is not None:
            self._accept_turn(entry, turn)
        return turn is None

    def _can_share(self, request: Request) -> bool:
        """True if the prompt's cache will be usable elsewhere; then its last tokens are left out where they must be."""
        if not self._context.local.is_producer or request.resumable:
            return False
        left_out = self._context.local.left_out
        return not left_out or leave_out(request, left_out)

    def _accept_turn(self, entry: EngineRequest, turn: RemotePrefill) -> None:
        """The router names a decoder that holds the last turn, which this prefill may load."""
        if self._context.local.is_named_by(turn):
            self._remote.keep_own(entry, turn)
        elif not self._remote.may_connect(entry.request, turn):
            return
        elif self._context.local.takes_turns:
            self._remote.accept(entry, turn, PromptKind.TURN)
        else:
            if self._context.local.is_consumer:
                self._context.loads.decline(turn)
            detail = "bidirectional_kv_xfer is not set on this engine"
            self._remote.compute_here(entry.request, "turns_off", detail)

    # Named prompts of other engines.

    def _accept_named_prompt(self, entry: EngineRequest, source: NamedPrefill) -> None:
        """A producer that prefills this prompt now, or has: it is asked for the ticket."""
        request = entry.request
        prompt = self._remote.prompt_to_compare(
            request, source, request.num_prompt_tokens
        )
        if prompt is None:
            return
        named_id = source.remote_request_id
        is_other_request = (
            source.transfer_id is None
            and named_id is not None
            and named_id not in request.request_id
        )
        if is_other_request:
            # vLLM's request ids contain the router's, which is all that both legs have in common.
            detail = f"its id does not contain the producer's, {named_id!r}"
            self._remote.compute_here(request, "prompt_unknown", detail)
        elif not self._queries.start(entry, source, prompt):
            self._remote.compute_here(
                request, "too_many_queries", "too many prompts are being queried"
            )
        elif request.abort_immediately or request.get_skip_reading_prefix_cache():
            # It is asked all the same: the ticket is given back when it comes.
            self._queries.ended(entry)
            detail = "it was rejected, or must not read cached prefixes"
            self._remote.compute_here(request, "not_wanted", detail)


def leave_out(request: Request, num_tokens: int) -> bool:
    """Remove the last tokens of a prompt that will be decoded elsewhere, and limit its answer to one token.

    Must be called before the request is scheduled.

    Returns:
        Whether its cache will be usable. If not, the request is unchanged and is served without a transfer: it is too
        short, requests log-probabilities of its prompt or at least two tokens, or ends within an image.
    """
    params = request.sampling_params
    num_left = request.num_prompt_tokens - num_tokens
    if num_left <= 0 or request.prompt_token_ids is None:
        return False
    if params is None or params.min_tokens > 1:
        return False
    if request.get_skip_reading_prefix_cache():
        return False
    for feature in request.mm_features:
        if feature.mm_position.offset + feature.mm_position.length > num_left:
            return False
    cut_prompt(request, num_left)
    request.max_tokens = 1
    return True


def _ticket_in(settled: Settled, prompt_tokens: int | None) -> RemotePrefill | None:
    """The params in the answer to a query; None if it has none.

    Raises:
        InputError: they are not well-formed.
    """
    answer = settled.answer
    if answer is None or not is_ticket(answer):
        return None
    return decode_params(answer.params, prompt_tokens)


class RemotePromptIntake:
    """Accepts prompts and turns that params or answers name.

    Args:
        trusted: the hosts that may be named.
    """

    def __init__(self, context: SchedulerContext, trusted: TrustedHosts) -> None:
        self._context = context
        self._trusted = trusted

    def accept(
        self,
        entry: EngineRequest,
        source: RemotePrefill,
        kind: PromptKind = PromptKind.HANDOVER,
    ) -> None:
        """Compare the prompt with what the producer has of it, and offer it to the ledger."""
        request = entry.request
        if self._context.local.is_named_by(source):
            self.keep_own(entry, source)
        prompt = self.prompt_to_compare(request, source, source.remote_num_tokens, kind)
        if prompt is None:
            return
        if request.abort_immediately:
            # The front end rejected this request and passes it on only to have the remote blocks released.
            self._context.loads.decline(source)
            request.kv_transfer_params = without_transfer(request.kv_transfer_params)
            return
        shared = shared_tokens(prompt, source.kvferry.digests, source.remote_num_tokens)
        self._offer(request, source, shared, kind)
        is_handover = kind is PromptKind.HANDOVER
        if self._context.local.offers_turns and is_handover and not request.resumable:
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
            num_tokens: as for `LocalEngine.prompt_of`.
        """
        if kind is PromptKind.HANDOVER and not self._context.local.is_consumer:
            self.compute_here(
                request, "wrong_role", "this engine is no consumer (kv_role)"
            )
            return None
        if self._context.local.is_named_by(source):
            self.compute_here(
                request, "local_engine", "the params name this engine itself"
            )
            return None
        if not self.may_connect(request, source):
            return None
        prompt = self._context.local.prompt_of(request, num_tokens)
        if prompt is None:
            if isinstance(source, RemotePrefill):
                self._context.loads.decline(source)
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
        """Prefill and decode are on this engine: the lease's blocks are in its prefix cache, and no other engine reads.

        The lease protects the prefix hit, so it ends when the request has blocks of its own or is over.
        """
        if source.kvferry.boot == self._context.local.memory.boot:
            entry.own_lease = RemoteLease.from_params(source).name

    def compute_here(self, request: Request, reason: str, detail: str) -> None:
        """Serve the request without a transfer; the reason is a label of metrics."""
        self._context.counters.add("local_recomputes", reason)
        if self._context.tracing is not None:
            self._context.tracing.computed_here(request, reason)
        request.kv_transfer_params = without_transfer(request.kv_transfer_params)
        logger.warning(
            "req=%s is computed here (%s): %s", request.request_id, reason, detail
        )

    def intend(self, request: Request, use: LeaseUse) -> bool:
        """Have the request get a lease when it is scheduled. False if it cannot."""
        is_intended = self._context.leases.intend(request.request_id, use)
        if not is_intended:
            logger.warning(
                "req=%s is served without a lease: a lease with its id has not ended",
                request.request_id,
            )
        return is_intended

    def _expect_another_turn(self, request: Request) -> None:
        """Record that its answer is offered, if the request has the remote lease."""
        # Sibling requests (`n > 1`) share one response, which has room for the params of one.
        if self._context.loads.state(request.request_id) is not None:
            self.intend(request, LeaseUse.TURN)

    def _offer(
        self,
        request: Request,
        source: RemotePrefill,
        num_shared: int,
        kind: PromptKind,
    ) -> None:
        is_all_or_nothing = self._context.local.is_all_or_nothing
        ends_elsewhere = source.remote_num_tokens != request.num_prompt_tokens
        if is_all_or_nothing and num_shared < source.remote_num_tokens:
            num_shared = 0
        elif self._context.local.needs_whole_prompts and ends_elsewhere:
            # Every token of the producer's depends on where its prompt ends.
            num_shared = 0
        elif is_all_or_nothing and not self._windows_reach(
            source, request.num_prompt_tokens
        ):
            self._context.loads.decline(source)
            detail = "it needs tokens whose blocks the producer, or vLLM here, frees"
            self.compute_here(request, "window_edge", detail)
            return
        num_shared = min(num_shared, request.num_prompt_tokens)
        refused = self._context.loads.offer(
            request.request_id, source, num_shared, time.monotonic(), kind=kind
        )
        if refused is not None:
            detail = (
                f"{source.remote_num_tokens} tokens of req={source.remote_request_id}"
            )
            self.compute_here(request, refused, detail)
            return
        if self._context.tracing is not None:
            self._context.tracing.decode_arrived(request, source, num_shared)
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
        if len(first_held) != len(self._context.local.groups):
            # A producer of an earlier version does not tell: then from the number of its blocks.
            groups = zip(
                self._context.local.block_spans, source.remote_block_ids, strict=False
            )
            first_held = tuple(
                held_from(span, len(ids), num_tokens) for span, ids in groups
            )
        return self._context.local.windows_reach(
            self._context.local.block_spans, first_held, num_tokens, prompt_tokens
        )
