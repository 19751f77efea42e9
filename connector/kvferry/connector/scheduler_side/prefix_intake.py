"""Prefixes of other engines: for which requests they are asked for, and what becomes of the answers.

    arrived     the request names sources, or `prefix_sources` does: they are asked, and the request waits
    looked_at   vLLM has looked up what this engine's own cache has: if not enough is missing, it waits no more
    take        sources have answered, or its time is over: it loads what the best one has, or is computed here

A prefix is an offer of nobody's: whatever is wrong with it, the request is served as if it had named no source. Nothing
is asked where a pull could not pay, by the estimate or by `prefix_pull_min_tokens`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvferry.connector.allowed_hosts import TrustedHosts
from kvferry.connector.scheduler_side.params_builder import prompt_of
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.requests import EngineRequest, SchedulerContext
from kvferry.connector.vllm.requests import hint_actions
from kvferry.link.query_commands import Producer
from kvferry.protocol.digests import CHUNK_TOKENS, GrowingChain, Prompt
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.hosts import host_port, one_spelling
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.prefix_queries import MAX_CHAIN_DIGESTS
from kvferry.protocol.prefix_sources import (
    MAX_SOURCES,
    PrefixSource,
    read_hint,
    read_hints,
    read_sources,
)
from kvferry.scheduler.consumer.prefix_search import PrefixSearch
from kvferry.scheduler.consumer.pull_estimate import PullEstimate, whole_chunks
from kvferry.scheduler.consumer.remote_prompt import PromptKind

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MOST_TOKENS = MAX_CHAIN_DIGESTS * CHUNK_TOKENS


class PrefixIntake:
    """Asks for prefixes, and accepts them, for one engine.

    Args:
        configured: the engines of `prefix_sources`.
        estimate: of what a pull costs, and what computing does.

    Attributes:
        estimate: as given.
    """

    def __init__(
        self,
        context: SchedulerContext,
        trusted: TrustedHosts,
        queries: PromptQueries,
        estimate: PullEstimate,
        configured: tuple[Producer, ...],
    ) -> None:
        self.estimate = estimate
        self._local = context.local
        self._requests = context.requests
        self._loads = context.loads
        self._counters = context.counters
        self._tracing = context.tracing
        self._trusted = trusted
        self._queries = queries
        self._configured = configured

    def arrived(self, entry: EngineRequest) -> None:
        """A request has arrived that loads nothing else: ask for its prefix, if that may pay."""
        request = entry.request
        if not self._local.asks_prefixes or not _wants_prefix(request):
            return
        num_tokens = request.num_prompt_tokens
        if self._local.is_all_or_nothing:
            # vLLM computes a prompt's last token in any case. A state must not have seen that token, and its window
            # begins one token earlier than what is held of a longer prefix.
            num_tokens -= 1
        most_tokens = min(whole_chunks(num_tokens), _MOST_TOKENS)
        if not most_tokens:
            return
        try:
            producers = self._producers(request)
        except InvalidParams as invalid:
            self._not_pulled(entry, "invalid_source", str(invalid))
            return
        if producers:
            self._ask(entry, producers, most_tokens)

    def looked_at(self, entry: EngineRequest, num_local_tokens: int) -> None:
        """This engine's own cache has so many tokens of a request that waits."""
        search = entry.record.search
        if search is None:
            return
        num_missing = search.most_tokens - num_local_tokens
        if num_missing >= search.min_tokens:
            return
        self._queries.ended(entry)
        self._give_back_unused()
        reason = "local_hit" if num_missing <= 0 else "below_threshold"
        self._not_pulled(entry, reason, f"{num_local_tokens} tokens are cached here")

    def take(self) -> None:
        """Apply what the sources have answered."""
        for search in self._queries.take_found(self.estimate.wait_s):
            entry = self._requests.find(search.request_id)
            if entry is None:
                if search.best is not None:
                    self._give_back(search.best)
            else:
                self._settled(entry, search)
        self._give_back_unused()

    # Asking.

    def _producers(self, request: Request) -> tuple[Producer, ...]:
        """Whom to ask: the request's own sources, or the configured ones.

        Raises:
            InvalidParams: what the request names is not usable.
        """
        params = request.kv_transfer_params
        named: tuple[PrefixSource, ...] = ()
        if isinstance(params, Mapping):
            named = read_sources(params) + read_hint(params)
        named += read_hints(hint_actions(request))
        if not named:
            return self._configured
        by_spelling = {
            (one_spelling(source.remote_host), source.remote_port): source
            for source in named
        }
        return tuple(
            (source.remote_host, source.remote_port) for source in by_spelling.values()
        )[:MAX_SOURCES]

    def _ask(
        self, entry: EngineRequest, producers: tuple[Producer, ...], most_tokens: int
    ) -> None:
        now_s = time.monotonic()
        asked: list[Producer] = []
        least_tokens = most_tokens + 1
        why_not = ("below_threshold", "it is sooner computed")
        for producer in producers:
            refused = self._why_not(producer, now_s)
            if refused is not None:
                why_not = refused
                continue
            least = self.estimate.least_tokens(producer, now_s)
            if least is not None and least <= most_tokens:
                asked.append(producer)
                least_tokens = min(least_tokens, least)
        if not asked:
            self._not_pulled(entry, *why_not)
            return
        prompt = prompt_of(entry.request, most_tokens, self._local)
        if prompt is None:
            return
        self._queries.searches.start(
            entry.request_id,
            asked,
            GrowingChain(prompt),
            most_tokens=most_tokens,
            min_tokens=least_tokens,
            now_s=now_s,
            until_s=now_s + self.estimate.wait_s(most_tokens),
        )
        self._queries.wait_for_search(entry)
        self._counters.add("prefix_queries")
        self._tracing.prefix_asked(entry.request, most_tokens, len(asked))

    def _why_not(self, producer: Producer, now_s: float) -> tuple[str, str] | None:
        """Why an engine is not asked: the label of the metric, and a text for the log; None if it is."""
        host, port = producer
        is_own_host = one_spelling(host) == one_spelling(self._local.host)
        if is_own_host and port == self._local.port:
            return "local_engine", "the source is this engine itself"
        # The operator has named the configured ones; a client can name any.
        if producer in self._configured:
            why = self._trusted.why_not(host)
        else:
            why = self._trusted.why_not_unannounced(host)
        if why is not None:
            return "host_not_allowed", why
        if self._queries.searches.is_full:
            return "too_many_queries", "too many searches are open"
        if self._queries.searches.is_paused(producer, now_s):
            return "no_answer", f"{host_port(*producer)} did not answer a moment ago"
        return None

    # Answers.

    def _settled(self, entry: EngineRequest, search: PrefixSearch) -> None:
        now_s = time.monotonic()
        self._counters.sample("prefix_wait_s", now_s - search.begun_s)
        source = search.best
        if source is None:
            # A later version of the answerer may have other reasons: they must not become labels of metrics.
            reason = search.reason
            if reason not in KNOWN_REFUSALS:
                reason = "no_prefix"
            self._not_pulled(entry, reason, "no source has it")
            return
        refused = self._why_not_accepted(entry.request, search, source)
        if refused is None:
            refused = self._offer(entry, search, source, now_s)
        if refused is not None:
            self._give_back(source)
            self._not_pulled(entry, refused, host_port(*_address_of(source)))

    def _why_not_accepted(
        self, request: Request, search: PrefixSearch, source: RemotePrefill
    ) -> str | None:
        if self._local.is_named_by(source):
            return "local_engine"
        if self._trusted.why_not(source.remote_host) is not None:
            return "host_not_allowed"
        # With a row it is not computed yet: a wait of unknown length, which the estimate does not know.
        if source.kvferry.stream_row is not None:
            return "invalid_answer"
        # The weights or the adapter may have changed while it waited: what was asked for is of the old ones.
        now = prompt_of(request, search.most_tokens, self._local)
        if now is None or not _has_same_model(now, search.chain.prompt):
            return "reset"
        if len(source.kvferry.held_from) != len(self._local.groups):
            return "invalid_answer"
        is_reached = self._local.windows_reach(
            self._local.block_spans,
            source.kvferry.held_from,
            source.remote_num_tokens,
            request.num_prompt_tokens,
        )
        if not is_reached:
            return "window_edge"
        return None

    def _offer(
        self,
        entry: EngineRequest,
        search: PrefixSearch,
        source: RemotePrefill,
        now_s: float,
    ) -> str | None:
        """Offer the prefix to the ledger. Returns why not, if it refuses."""
        num_tokens = source.remote_num_tokens
        shared = search.chain.shared_tokens(source.kvferry.digests, num_tokens)
        if self._local.is_all_or_nothing and shared < num_tokens:
            shared = 0
        # By who has answered, not by the address in the ticket: that one is the peer's own word.
        producer = search.best_from or _address_of(source)
        min_tokens = self.estimate.least_tokens(producer, now_s) or search.min_tokens
        if 0 < shared < min_tokens:
            return "below_threshold"
        refused = self._loads.offer(
            entry.request_id,
            source,
            shared,
            now_s,
            kind=PromptKind.PREFIX,
            min_tokens=min_tokens,
        )
        if refused is not None:
            return refused
        self._counters.add("prefixes_found")
        self._tracing.decode_arrived(entry.request, source, shared)
        logger.debug(
            "req=%s: %d of %d tokens are read from engine %s as slot=%d: about %.1f ms at %.3g GB/s, in place of %.1f "
            "ms at %.0f tokens/s",
            entry.request_id,
            shared,
            entry.request.num_prompt_tokens,
            source.engine_id,
            source.kvferry.lease_slot,
            self.estimate.load_s(producer, shared, now_s) * 1e3,
            self.estimate.bytes_s(producer, now_s) / 1e9,
            self.estimate.compute_s(shared) * 1e3,
            self.estimate.tokens_s(),
        )
        return None

    def _give_back_unused(self) -> None:
        for ticket in self._queries.searches.take_unused():
            self._give_back(ticket)

    def _give_back(self, ticket: RemotePrefill) -> None:
        # To this engine's own lease nothing is sent: it ends with its time.
        if self._trusted.allow(ticket.remote_host):
            self._loads.decline(ticket)

    def _not_pulled(self, entry: EngineRequest, reason: str, detail: str) -> None:
        self._counters.add("prefixes_not_pulled", reason)
        self._tracing.prefix_not_pulled(entry.request, reason)
        # A prefix that is not there is ordinary, and a line for each request would hide the rest.
        level = logging.DEBUG
        if reason in _OPERATORS_FAULT:
            level = logging.WARNING
        logger.log(
            level,
            "req=%s: its prefix is computed here (%s): %s",
            entry.request_id,
            reason,
            detail,
        )


KNOWN_REFUSALS = frozenset(
    (
        "no_prefix",
        "no_lease",
        "prefix_off",
        "lease_over",
        "no_answer",
        "too_late",
        "invalid_answer",
    )
)
"""Reasons that answers have, or that stand for a missing one."""

_OPERATORS_FAULT = frozenset(("host_not_allowed", "invalid_source"))


def _wants_prefix(request: Request) -> bool:
    """True if vLLM looks a request's prefix up, and goes on from what is loaded."""
    if request.resumable or request.abort_immediately:
        return False
    return not request.get_skip_reading_prefix_cache()


def _has_same_model(now: Prompt, before: Prompt) -> bool:
    return (now.lora, now.salt, now.media, now.weights) == (
        before.lora,
        before.salt,
        before.media,
        before.weights,
    )


def _address_of(source: RemotePrefill) -> Producer:
    return source.remote_host, source.remote_port
