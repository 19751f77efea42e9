"""Prefixes, both ends: those of other engines for this engine's requests, and this engine's own for others.

`PrefixIntake`, for a request that loads nothing else:

    arrived     the request names sources, or `prefix_sources` does: they are asked, and the request waits
    looked_at   vLLM has looked up what this engine's own cache has: if not enough is missing, it waits no more
    take        sources have answered, or its time is over: it loads what the best one has, or is computed here

A prefix is optional: whatever is wrong with it, the request is served as if it had named no source. Nothing
is asked where a pull could not pay, by the estimate or by `prefix_pull_min_tokens`.

`PrefixLeases`, for what other engines have found in this engine's prefix cache:

    admitted, ended    the request's tokens are listed (`PrefixDirectory`)
    every step         of what queries have found: check a part of the blocks, and take references on them; with the
                       last part open a lease, READY when the device has passed this step

The listener's thread has found the blocks a moment ago. A block is checked by its hash when its reference is taken, and
from then on vLLM gives it to nobody. vLLM hashes blocks when it schedules the step that fills them, so a lease is held
as one whose prompt this step completes. Nothing here may make the engine's own requests wait. So prefixes have a share
of the blocks and of the slots, are not opened while little is free, and go first when blocks are needed
(`eviction_order.py`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.requests import EngineRequest, SchedulerContext
from kvferry.connector.scheduler_side.taken_back import TakeBacks
from kvferry.connector.scheduler_side.tickets import ParamsBuilder
from kvferry.connector.vllm.core import EngineLoop
from kvferry.connector.vllm.prefix_cache import PrefixCache
from kvferry.connector.vllm.scheduler import hint_actions
from kvferry.link.allowed_hosts import TrustedHosts
from kvferry.link.commands import Producer
from kvferry.protocol.digests import CHUNK_TOKENS, GrowingChain, Prompt
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.hosts import host_port, one_spelling
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.prefix_sources import (
    MAX_SOURCES,
    PrefixSource,
    read_hint,
    read_hints,
    read_sources,
)
from kvferry.protocol.queries import MAX_CHAIN_DIGESTS, PrefixRefusal
from kvferry.scheduler.consumer.pull_estimate import PullEstimate, whole_chunks
from kvferry.scheduler.producer.block_references import Reservation
from kvferry.scheduler.producer.prefix_directory import (
    ListedSequence,
    PrefixDirectory,
    QueriedPrefix,
)
from kvferry.scheduler.requests import LeaseUse, PrefixSearch, PromptKind

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
        self._context = context
        self._trusted = trusted
        self._queries = queries
        self._configured = configured

    def arrived(self, entry: EngineRequest) -> None:
        """A request has arrived that loads nothing else: ask for its prefix, if that may pay.

        Called where `LocalEngine.asks_prefixes`.
        """
        request = entry.request
        if not _wants_prefix(request):
            return
        num_tokens = request.num_prompt_tokens
        if self._context.local.is_all_or_nothing:
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
            entry = self._context.requests.find(search.request_id)
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
        prompt = self._context.local.prompt_of(entry.request, most_tokens)
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
        self._context.counters.add("prefix_queries")
        if self._context.tracing is not None:
            self._context.tracing.prefix_asked(entry.request, most_tokens, len(asked))

    def _why_not(self, producer: Producer, now_s: float) -> tuple[str, str] | None:
        """Why an engine is not asked: the label of the metric, and a text for the log; None if it is."""
        host, port = producer
        is_own_host = one_spelling(host) == one_spelling(self._context.local.host)
        if is_own_host and port == self._context.local.port:
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
        self._context.counters.sample("prefix_wait_s", now_s - search.begun_s)
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
        if self._context.local.is_named_by(source):
            return "local_engine"
        if self._trusted.why_not(source.remote_host) is not None:
            return "host_not_allowed"
        # With a row it is not computed yet: a wait of unknown length, which the estimate does not know.
        if source.kvferry.stream_row is not None:
            return "invalid_answer"
        # The weights or the adapter may have changed while it waited: what was asked for is of the old ones.
        now = self._context.local.prompt_of(request, search.most_tokens)
        if now is None or not _has_same_model(now, search.chain.prompt):
            return "reset"
        if len(source.kvferry.held_from) != len(self._context.local.groups):
            return "invalid_answer"
        is_reached = self._context.local.windows_reach(
            self._context.local.block_spans,
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
        if self._context.local.is_all_or_nothing and shared < num_tokens:
            shared = 0
        # By who has answered, not by the address in the ticket: that one is the peer's own word.
        producer = search.best_from or _address_of(source)
        min_tokens = self.estimate.least_tokens(producer, now_s) or search.min_tokens
        if 0 < shared < min_tokens:
            return "below_threshold"
        refused = self._context.loads.offer(
            entry.request_id,
            source,
            shared,
            now_s,
            kind=PromptKind.PREFIX,
            min_tokens=min_tokens,
        )
        if refused is not None:
            return refused
        self._context.counters.add("prefixes_found")
        if self._context.tracing is not None:
            self._context.tracing.decode_arrived(entry.request, source, shared)
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
            self._context.loads.decline(ticket)

    def _not_pulled(self, entry: EngineRequest, reason: str, detail: str) -> None:
        self._context.counters.add("prefixes_not_pulled", reason)
        if self._context.tracing is not None:
            self._context.tracing.prefix_not_pulled(entry.request, reason)
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


BLOCKS_AT_ONCE = 128
"""Most references that are taken in one step: some 0.1 ms, mostly to fetch the blocks' objects from memory.
Fewer make the ticket of a long prefix later, by a step of the engine for each part; with 256 the 99th percentile of
what a question adds to a step was 0.4 ms (`bench.prefix_step`)."""
SHARE = 4
"""Prefixes may keep 1/4 of the blocks and of the slots."""
RESERVED = 8
"""They are opened while 1/8 of the blocks and of the slots stays free."""


@dataclass(slots=True, eq=False)
class _Taking:
    """A prefix on whose blocks references are taken.

    Attributes:
        reservation: those of its blocks that have one, the first ones.
    """

    queried: QueriedPrefix
    reservation: Reservation = field(default_factory=Reservation)

    @property
    def num_taken(self) -> int:
        return len(self.reservation.block_ids)

    @property
    def blocks_left(self) -> int:
        return len(self.queried.found.block_ids) - self.num_taken


class PrefixLeases:
    """The engine's thread of `PrefixDirectory`.

    Args:
        take_backs: what vLLM may still take back is not held.
        cache: nothing is listed, and so nothing is found, until it is bound.
    """

    def __init__(
        self,
        context: SchedulerContext,
        cache: PrefixCache,
        take_backs: TakeBacks,
        builder: ParamsBuilder,
        loop: EngineLoop,
        directory: PrefixDirectory,
    ) -> None:
        self._local = context.local
        self._leases = context.leases
        self._blocks = context.blocks
        self._cache = cache
        self._take_backs = take_backs
        self._builder = builder
        self._loop = loop
        self._directory = directory
        self._taking: deque[_Taking] = deque()
        self._num_taken = 0
        self._model = ("", 0)
        # A client chooses the ids of requests, and must not choose that of a lease.
        self._name = f"prefix-{secrets.token_hex(8)}"
        self._num_opened = 0

    @property
    def needs_step(self) -> bool:
        """True if a step has something to do here."""
        return bool(self._taking or self._directory.wanted or self._directory.given_up)

    # A request.

    def admitted(self, entry: EngineRequest) -> None:
        """vLLM has given a request its first blocks."""
        directory = self._directory
        if not self._cache.hash_tokens:
            return
        # One more token than the prompt has: the list that grows with the answer.
        prompt = self._local.prompt_of(
            entry.request, entry.request.num_prompt_tokens + 1
        )
        if prompt is None:
            return
        # Also for what is not listed: it fills blocks, with hashes by which others may look for them.
        self._note_model(prompt.weights)
        listed = entry.listed_sequence
        is_listed = listed is not None and listed.generation == directory.generation
        # The adapter may be another one from one step to the next.
        adapter = entry.request.lora_request
        may_change = adapter is not None and adapter.load_inplace
        if is_listed or entry.request.resumable or may_change:
            return
        # The tokens and the hashes are vLLM's own lists, which grow with the request.
        sequence = ListedSequence(
            prompt,
            entry.request.block_hashes,
            entry.request.num_tokens,
            directory.generation,
        )
        directory.reports.append(sequence)
        entry.listed_sequence = sequence

    def ended(self, entry: EngineRequest) -> None:
        """A request has ended: its answer can be the beginning of a prompt, too."""
        sequence = entry.listed_sequence
        if sequence is not None:
            sequence.num_tokens = entry.request.num_tokens
            self._directory.reports.append(sequence)

    def reset(self) -> None:
        """vLLM's prefix cache is emptied, or the weights change."""
        self._directory.reset()
        while self._taking:
            self._drop(self._taking[0], PrefixRefusal.NO_PREFIX)

    def taken_back(self, not_filled: AbstractSet[int]) -> None:
        """vLLM has heard that these blocks do not have what their hashes said."""
        for taking in list(self._taking):
            if not not_filled.isdisjoint(taking.reservation.block_ids):
                self._drop(taking, PrefixRefusal.NO_PREFIX)

    # A step.

    def step(self, *, computes: bool) -> None:
        """A step was scheduled: hold what was found, as much of it as one step may.

        Args:
            computes: whether the step computes any token.
        """
        if self._leases.num_prefixes and self._loop.is_paused:
            # A pause is complete when no block is held, and whoever pauses an engine waits for that. Who reads a prefix
            # can compute it.
            self._leases.release_all("evicted", (LeaseUse.PREFIX,))
        if not self.needs_step:
            return
        self._note_model(self._local.weights.version())
        self._end_given_up()
        self._taking.extend(map(_Taking, self._directory.take_wanted()))
        num_left = BLOCKS_AT_ONCE
        for taking in list(self._taking):
            if num_left <= 0:
                break
            num_left -= self._go_on(taking, num_left, computes=computes)

    def _go_on(self, taking: _Taking, num_blocks: int, *, computes: bool) -> int:
        """Take so many references at most, and open the lease if those were the last. Returns how many."""
        queried = taking.queried
        if queried.is_given_up:
            self._drop(taking, None)
            return 0
        refusal = self._why_not(taking)
        if refusal is not None:
            self._drop(taking, refusal)
            return 0
        found = queried.found
        first = taking.num_taken
        stop = min(first + num_blocks, len(found.block_ids))
        if not self._cache.keep(found.block_ids[first:stop], found.hashes[first:stop]):
            self._give_back(taking)
            self._directory.changed(queried)
            return stop - first
        references = self._leases.block_references
        references.reserve(taking.reservation, found.block_ids[first:stop])
        self._num_taken += stop - first
        if not taking.blocks_left and not self._take_backs.may_come(found.block_ids):
            self._open(taking, computes=computes)
        return stop - first

    def _open(self, taking: _Taking, *, computes: bool) -> None:
        queried = taking.queried
        found = queried.found
        self._forget(taking)
        self._num_opened += 1
        lease = self._leases.hold_prefix(
            f"{self._name}-{self._num_opened}",
            self._builder.worker_prefix_blocks(found),
            taking.reservation,
            is_computed=not computes,
        )
        self._directory.opened(queried, lease)
        logger.debug(
            "%s slot=%d holds a prefix of %d tokens",
            lease.request_id,
            lease.slot,
            found.num_tokens,
        )

    def _why_not(self, taking: _Taking) -> PrefixRefusal | None:
        """Why a prefix cannot be held now; None if it can."""
        if self._loop.is_ending or self._loop.is_paused:
            return PrefixRefusal.NO_PREFIX
        if taking.queried.generation != self._directory.generation:
            return PrefixRefusal.NO_PREFIX
        leases = self._leases
        num_slots = leases.slots.count
        if leases.num_prefixes >= max(1, num_slots // SHARE):
            return PrefixRefusal.NO_LEASE
        if len(leases.slots.free) <= num_slots // RESERVED:
            return PrefixRefusal.NO_LEASE
        num_blocks = self._blocks.num_blocks
        num_kept = leases.num_prefix_blocks + self._num_taken + taking.blocks_left
        if num_kept > num_blocks // SHARE:
            return PrefixRefusal.NO_LEASE
        # As if none of its blocks were used by a request: to count them takes a look at each.
        if self._blocks.num_free - taking.blocks_left < num_blocks // RESERVED:
            return PrefixRefusal.NO_LEASE
        return None

    def _end_given_up(self) -> None:
        for queried in self._directory.take_given_up():
            lease = queried.lease
            if lease is not None and not lease.ended_by:
                self._leases.end(lease, "release")

    def _note_model(self, weights: str) -> None:
        # vLLM's hashes depend neither on the weights nor on what an adapter's files hold: what was listed with the old
        # ones would find blocks of the new.
        model = (weights, self._local.adapters.num_replaced)
        if model != self._model:
            self._model = model
            self.reset()

    def _drop(self, taking: _Taking, reason: PrefixRefusal | None) -> None:
        self._give_back(taking)
        if reason is not None:
            self._directory.refused(taking.queried, reason)

    def _give_back(self, taking: _Taking) -> None:
        self._forget(taking)
        self._leases.block_references.cancel(taking.reservation)

    def _forget(self, taking: _Taking) -> None:
        self._taking.remove(taking)
        self._num_taken -= taking.num_taken
