"""Tickets: when a prompt's blocks are held for another engine, and the params by which it reads them.

    admitted     the lease has a slot
    every step   a streamed prompt: publish the blocks that the step completes; the ticket is given at the first part
    last step    hold the blocks and give the ticket: `_issue_early`
    ended        the params of the answer, which are the ticket's; with states, or for a turn, the blocks are held now

The workers mark the end of a step, so consumers may read what it has written as soon as the device is done with it.
`TicketBuilder` decides when; `ParamsBuilder` writes and signs the params, also those of prefixes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.requests import (
    EngineRequest,
    IssuedTicket,
    SchedulerContext,
)
from kvferry.connector.scheduler_side.taken_back import TakeBacks
from kvferry.connector.vllm.scheduler import (
    cached_tokens_of,
    distinct_blocks,
    has_ended_well,
)
from kvferry.plan.blocks import NULL_BLOCK, first_needed, held_from
from kvferry.protocol.digests import GrowingChain, UncoveredToken, digest_chain
from kvferry.protocol.params import (
    NO_MAC,
    PARAMS_VERSION,
    Blocks,
    RemotePrefill,
    Ticket,
    request_name,
    sign_early,
    sign_params,
)
from kvferry.scheduler.producer.prefix_directory import CachedPrefix
from kvferry.scheduler.producer.prompt_directory import FAILED, PromptDirectory
from kvferry.scheduler.requests import (
    LeaseState,
    LeaseUse,
    ProducerLease,
    PublishedStream,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)

_READ_OR_HELD = ("", "done")
"""`ProducerLease.ended_by` of a lease that has not ended, or that a consumer has read already."""


@dataclass(slots=True)
class _Prefill:
    """A prompt for another engine that is not complete.

    Attributes:
        chain: its digests so far: all of a long prompt's would take too long in one step.
        is_refused: whether it is queried and cannot be streamed.
        cached_tokens: see `Answer`; vLLM's own count of it is gone when the request ends.
    """

    entry: EngineRequest
    chain: GrowingChain
    is_refused: bool = False
    cached_tokens: int | None = None


class TicketBuilder:
    """The tickets of one engine.

    Args:
        context: its counters count `streams_refused`.
        directory: the prompts that other engines may ask for.
        take_backs: what vLLM may still take back.
        can_stream: whether prompts can be read while they are computed.

    Attributes:
        builder: of the params.
        directory: as given.
        can_stream: as given.
    """

    def __init__(
        self,
        context: SchedulerContext,
        builder: ParamsBuilder,
        directory: PromptDirectory,
        take_backs: TakeBacks,
        *,
        can_stream: bool,
    ) -> None:
        self.builder = builder
        self.directory = directory
        self.can_stream = can_stream
        self._context = context
        # A model with recurrent states moves them between blocks when a request ends, so there the blocks are held from
        # the end on. Such a prefill is always capped at one token (`intake.leave_out`): it ends with its prompt.
        self._holds_early = not context.local.has_states
        self._take_backs = take_backs
        # Since the last step.
        self._admitted: list[EngineRequest] = []
        # What every step looks at, so not all requests are looked at for it.
        self._prefills: dict[EngineRequest, _Prefill] = {}

    def admitted(self, entry: EngineRequest) -> None:
        """The request is scheduled, for the first time or again, and its lease has a slot."""
        self._admitted.append(entry)
        lease = self._context.leases.running(entry.request_id)
        if lease is None:
            self.directory.over(entry.request_id, "no_lease")
            return
        if lease.use is not LeaseUse.PROMPT:
            return
        # A prefill may generate more than one token. What it generates is its own: the ticket is of the prompt, which
        # is all that a decoder can compare with its own.
        prefill = self._prefills.get(entry)
        if prefill is None:
            prompt = self._context.local.prompt_of(
                entry.request, entry.request.num_prompt_tokens
            )
            if prompt is None:
                return
            prefill = _Prefill(entry, GrowingChain(prompt))
            self._prefills[entry] = prefill
        prefill.cached_tokens = cached_tokens_of(entry.request)

    def reset(self) -> None:
        """The weights have changed or are about to: a prompt that begins anew gets other digests."""
        self._prefills.clear()

    # A step.

    def scheduled(
        self, num_tokens: Mapping[str, int], preempted: Collection[str], *, loads: bool
    ) -> None:
        """Hold the blocks of the prompts that this step completes, and publish those of streamed ones.

        Args:
            num_tokens: of each request, in this step.
            preempted: requests whose blocks were freed since the last step.
            loads: whether another connector loads within this step.
        """
        admitted = self._admitted
        self._admitted = []
        if loads or self._take_backs.are_possible:
            for unsound in self._take_backs.begin_step(
                admitted, num_tokens, loads=loads
            ):
                self._give_up(unsound)
        for request_id in preempted:
            entry = self._context.requests.find(request_id)
            if entry is not None and entry.ticket is not None:
                # The request may be computed again late, or never: from now on only a renewal keeps its lease.
                _, held = entry.ticket
                self._context.leases.start_deadline(held)
        for entry, prefill in list(self._prefills.items()):
            lease = self._context.leases.running(entry.request_id)
            if lease is None:
                del self._prefills[entry]
            elif lease.state is LeaseState.COMPUTING:
                computed = num_tokens.get(entry.request_id, 0)
                is_preempted = entry.request_id in preempted
                try:
                    self._advance(prefill, lease, computed, is_preempted=is_preempted)
                except UncoveredToken as uncovered:
                    self._keep(entry, uncovered)

    def taken_back(self, invalid: set[int]) -> set[int]:
        """vLLM has heard that these blocks were not filled: nothing that was computed from them may be read.

        Returns:
            These blocks, and what was computed from them.
        """
        taken = self._take_backs.has_come(invalid)
        for unsound in taken.unsound:
            self._give_up(unsound)
        for lease in self._context.leases.leases(LeaseState.HELD):
            if not taken.not_filled.isdisjoint(lease.block_ids):
                self._context.leases.end(lease, "abandoned")
        # vLLM leaves the blocks in the prefix cache until they are computed again: later prompts would hit them.
        self._context.blocks.forget_hits(taken.not_filled)
        return taken.not_filled

    def _advance(
        self,
        prefill: _Prefill,
        lease: ProducerLease,
        num_tokens: int,
        *,
        is_preempted: bool,
    ) -> None:
        """This step computes so many tokens of a prompt, or none."""
        entry = prefill.entry
        request = entry.request
        stream = lease.stream
        if stream is not None:
            has_lost_tokens = (
                is_preempted or request.num_computed_tokens < stream.tokens
            )
            if has_lost_tokens:
                self._context.leases.streams.restart(lease, stream)
        if not num_tokens:
            return
        num_complete = min(
            request.num_computed_tokens + num_tokens, request.num_prompt_tokens
        )
        # As long as vLLM may take back what the first step has computed, nothing is published and no ticket is given.
        may_be_taken_back = (
            self._take_backs.are_possible and self._take_backs.is_unsettled(entry)
        )
        if not may_be_taken_back:
            self._issue_step(prefill, lease, num_complete)
        is_incomplete = entry in self._prefills
        if is_incomplete:
            # A step ahead: then the last step, which needs all of them, has few to make.
            prefill.chain.grow(
                min(num_complete + num_tokens, request.num_prompt_tokens)
            )

    def _issue_step(
        self, prefill: _Prefill, lease: ProducerLease, num_complete: int
    ) -> None:
        """So many tokens of a prompt are complete when this step has ended, and vLLM will take none of them back."""
        entry = prefill.entry
        request = entry.request
        stream = lease.stream
        was_complete = request.num_computed_tokens >= request.num_prompt_tokens
        if stream is not None and was_complete:
            self._give_up(entry)  # an unsettled step has completed it: see `_is_late`
            return
        is_complete = num_complete == request.num_prompt_tokens
        if stream is None and not is_complete:
            stream = self._begin_stream(prefill, lease)
        is_held = is_complete and self._holds_early
        if stream is not None:
            table = self._context.blocks.table(entry.request_id)
            self._publish(lease, stream, table, num_complete, is_last=is_held)
        if is_held:
            del self._prefills[entry]
            self._issue_early(prefill, lease)

    def _issue_early(self, prefill: _Prefill, lease: ProducerLease) -> None:
        """Hold the blocks of a prompt that this step completes, and give its ticket."""
        # Not at the request's end. By then a prefill that answers more than one token has blocks of the answer, which
        # the decoder's prompt lacks, and vLLM has freed what has left a window since.
        entry = prefill.entry
        num_tokens = entry.request.num_prompt_tokens
        block_ids = self._context.blocks.table(entry.request_id)
        digests = prefill.chain.digests(num_tokens)
        params = self.builder.build(
            entry.request, block_ids, num_tokens, lease, digests
        )
        if params is None:
            return
        worker_blocks = self.builder.worker_blocks(params)
        self._context.leases.complete(
            entry.request_id, worker_blocks, distinct_blocks(block_ids)
        )
        entry.ticket = (params, lease)
        self._give_ticket(prefill, params, lease)

    # Streams.

    def _begin_stream(
        self, prefill: _Prefill, lease: ProducerLease
    ) -> PublishedStream | None:
        """Give a consumer that has queried the prompt a ticket for what is computed of it."""
        request = prefill.entry.request
        if prefill.is_refused:
            return None
        queried = self.directory.waiting(request.request_id)
        if queried is None:
            return None
        stream: PublishedStream | None = None
        if not self.can_stream:
            self._context.counters.add("streams_refused", "engine")
        elif not queried.spans:
            self._context.counters.add("streams_refused", "consumer")
        elif not self.builder.windows_reach(
            request.num_prompt_tokens, queried.num_tokens, queried.spans
        ):
            self._context.counters.add("streams_refused", "window")
        else:
            stream = self._context.leases.streams.begin(lease)
        if stream is None:
            prefill.is_refused = True  # counted once, not in every step
            return None
        # The directory has digested the prompt for the query, with the tokens that are left out here.
        prefill.chain.adopt(queried.digests, request.num_prompt_tokens)
        digests = prefill.chain.digests(request.num_prompt_tokens)
        params = self.builder.build_stream(request, lease, stream.row, digests)
        self._give_ticket(prefill, params, lease)
        return stream

    def _publish(
        self,
        lease: ProducerLease,
        stream: PublishedStream,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        is_last: bool,
    ) -> None:
        blocks = self.builder.listed_blocks(block_ids, num_tokens, is_last=is_last)
        if not stream.goes_on_with(blocks):
            self._context.leases.streams.restart(lease, stream)
        self._context.leases.streams.publish(lease, stream, num_tokens, blocks)

    def _give_ticket(
        self, prefill: _Prefill, params: RemotePrefill, lease: ProducerLease
    ) -> None:
        """For a prompt that this step, or a later one, completes."""
        ticket = sign_early(params, self._context.local.memory.mac_key, OPENS_WITHIN_S)
        self.directory.ticket(
            prefill.entry.request_id, ticket, lease, cached_tokens=prefill.cached_tokens
        )

    # The end.

    def ended(
        self, entry: EngineRequest, block_ids: Sequence[Sequence[int]]
    ) -> IssuedTicket | None:
        """The request has ended: the params of its blocks, which are held, and the lease; None if they are not."""
        prefill = self._prefills.pop(entry, None)
        lease = self._context.leases.running(entry.request_id)
        ticket: IssuedTicket | None = None
        if entry.ticket is not None:
            ticket = self._end_held(entry, entry.ticket)
        elif lease is not None:
            ticket = self._issue_late(entry, lease, block_ids, prefill)
        if ticket is not None:
            reason = ""
        elif has_ended_well(entry.request):
            reason = "no_lease"
        else:
            reason = FAILED
        self.directory.finished(entry.request_id, reason)
        return ticket

    def _end_held(
        self, entry: EngineRequest, ticket: IssuedTicket
    ) -> IssuedTicket | None:
        """End a request whose blocks are held already; None if its lease was ended since."""
        _, lease = ticket
        self._context.leases.request_ended(lease)
        if not has_ended_well(entry.request) and not lease.ended_by:
            self._context.leases.end(lease, "abandoned")
        if lease.ended_by not in _READ_OR_HELD:
            return None
        return ticket

    def _issue_late(
        self,
        entry: EngineRequest,
        lease: ProducerLease,
        block_ids: Sequence[Sequence[int]],
        prefill: _Prefill | None,
    ) -> IssuedTicket | None:
        """Hold the blocks of a request that has ended, and give its ticket; None if they cannot be offered."""
        request = entry.request
        # Of what vLLM has taken back, and of what it has not answered yet, nothing counts here. So an unsettled request
        # that gets here is sound: vLLM has kept its tokens.
        num_tokens = self.builder.num_complete_tokens(request, lease.use)
        if lease.use is LeaseUse.PROMPT:
            # It may have ended unsettled with an answer.
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        is_whole = num_tokens == request.num_prompt_tokens
        params: RemotePrefill | None = None
        if not self._is_late(lease, is_whole=is_whole):
            if lease.stream is not None:
                self._publish(lease, lease.stream, block_ids, num_tokens, is_last=True)
            digests: tuple[str, ...] = ()
            try:
                if prefill is not None and is_whole:
                    digests = prefill.chain.digests(num_tokens)
                params = self.builder.build(
                    request, block_ids, num_tokens, lease, digests
                )
            except UncoveredToken as uncovered:
                self._keep(entry, uncovered)
                return None
        if params is None:
            self._context.leases.abandon(entry.request_id)
            return None
        worker_blocks = self.builder.worker_blocks(params)
        self._context.leases.finish(
            entry.request_id, worker_blocks, distinct_blocks(block_ids)
        )
        cached_tokens = prefill.cached_tokens if prefill is not None else None
        self.directory.ticket(
            entry.request_id, params, lease, cached_tokens=cached_tokens
        )
        return params, lease

    def _is_late(self, lease: ProducerLease, *, is_whole: bool) -> bool:
        """True if a stream was completed by an unsettled step, or not at all.

        Its ticket may promise a block of a window that vLLM has freed since.
        """
        return lease.stream is not None and (self._holds_early or not is_whole)

    def _keep(self, entry: EngineRequest, uncovered: UncoveredToken) -> None:
        """No other engine could tell that it has the same prompt."""
        self._prefills.pop(entry, None)
        self._give_up(entry)
        self._context.counters.add("prefills_kept")
        logger.info(
            "req=%s cannot be decoded elsewhere, and is served without params: %s",
            entry.request_id,
            uncovered,
        )

    def _give_up(self, entry: EngineRequest) -> None:
        """What a request computes may not be read; it is answered all the same."""
        lease = self._context.leases.running(entry.request_id)
        if lease is not None and lease.state is LeaseState.COMPUTING:
            self._context.leases.abandon(entry.request_id)
            self.directory.over(entry.request_id, "no_lease")


OPENS_WITHIN_S = 10.0
"""The workers get the orders of a step when the one before it has run, if steps overlap; a ticket is given earlier."""


class ParamsBuilder:
    """Builds the params of one engine's requests.

    Args:
        lease_s: lifetime of a held lease without a renewal.
        copies_blocks: whether workers copy blocks before they are read, and so must know them.
    """

    def __init__(
        self,
        local: LocalEngine,
        kv_cache_config: KVCacheConfig,
        lease_s: float,
        *,
        copies_blocks: bool = False,
    ) -> None:
        self._local = local
        self._lease_s = lease_s
        self._copies_blocks = copies_blocks
        self._kv_cache_config = kv_cache_config

    def worker_blocks(self, params: RemotePrefill) -> Blocks:
        """The blocks in the order to the workers to hold a lease: those of its params, where workers copy them."""
        return params.remote_block_ids if self._copies_blocks else ()

    def load_blocks(
        self, block_ids: tuple[list[int], ...], shared_tokens: int
    ) -> tuple[Sequence[int], ...]:
        """The blocks into which the first `shared_tokens` tokens of a request are loaded, per transferred group."""
        blocks = self._kv_cache_config.select_transfer_block_ids(block_ids)
        if not self._local.has_states:
            return tuple(blocks)
        return self._local.without_scratch(blocks, shared_tokens)

    def num_complete_tokens(self, request: Request, use: LeaseUse) -> int:
        """The tokens of an ended request whose cache is complete; 0 if it failed.

        The token that was sampled last has no cache, and tokens of a step in flight may have none.
        """
        if not has_ended_well(request):
            return 0
        num_computed: int = request.num_computed_tokens - request.num_in_flight_tokens
        num_complete = min(num_computed, len(request.all_token_ids) - 1)
        if use is LeaseUse.TURN:
            # An answer's last tokens were computed from drafts by the modules of a multi-token predictor. A prompt's
            # were left out at its intake.
            num_complete -= self._local.left_out
        return max(0, num_complete)

    def build(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        lease: ProducerLease,
        digests: tuple[str, ...] = (),
    ) -> RemotePrefill | None:
        """The signed params of a request's first `num_tokens` tokens; None if it has no blocks for them.

        Args:
            digests: of these tokens, if they are known.

        Raises:
            UncoveredToken: they have no digests.
        """
        if not num_tokens:
            return None
        blocks = self._transferable(block_ids, num_tokens)
        if not any(blocks):
            return None
        if not digests:
            prompt = self._local.prompt_of(request, num_tokens)
            if prompt is None:
                return None
            digests = digest_chain(prompt, num_tokens)
        return self._signed(request.request_id, lease, blocks, num_tokens, digests)

    def build_prefix(
        self, cached: CachedPrefix, digests: tuple[str, ...], lease: ProducerLease
    ) -> RemotePrefill:
        """The signed params of a prefix in this engine's cache. May be called on any thread.

        Args:
            digests: of its tokens.
        """
        blocks = self._transferable(cached.blocks, cached.num_tokens)
        params = self._signed(
            lease.request_id, lease, blocks, cached.num_tokens, digests
        )
        return sign_early(params, self._local.memory.mac_key, OPENS_WITHIN_S)

    def worker_prefix_blocks(self, cached: CachedPrefix) -> Blocks:
        """As `worker_blocks`, of a prefix in this engine's cache."""
        if not self._copies_blocks:
            return ()
        return self._transferable(cached.blocks, cached.num_tokens)

    def build_stream(
        self,
        request: Request,
        lease: ProducerLease,
        row: int,
        digests: tuple[str, ...],
    ) -> RemotePrefill:
        """The signed params of a prompt that is being computed, whose blocks the workers list in a row.

        Args:
            digests: of the whole prompt.
        """
        # The workers list the blocks in the row, where the consumer reads them.
        no_blocks = ((),) * len(self._local.groups)
        return self._signed(
            request.request_id,
            lease,
            no_blocks,
            request.num_prompt_tokens,
            digests,
            row=row,
        )

    def windows_reach(
        self, num_tokens: int, prompt_tokens: int, spans: tuple[int, ...]
    ) -> bool:
        """True if an engine with blocks of these spans can surely go on from a prefill of a prompt.

        Args:
            num_tokens: of the prompt, without those that are left out here.
            prompt_tokens: with them.
        """
        # When the first `num_tokens` are complete, more may be held than this.
        first_held = self._held_at_the_end(num_tokens)
        if len(spans) != len(first_held):
            return False
        return self._local.windows_reach(spans, first_held, num_tokens, prompt_tokens)

    def blocks_of(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> tuple[Sequence[int], ...]:
        """The blocks of the first `num_tokens` tokens of a request, per transferred group."""
        # vLLM may have one more block, for the token of a step that was in flight when the request stopped.
        transferred = self._kv_cache_config.select_transfer_block_ids(block_ids)
        blocks: list[Sequence[int]] = []
        for ids, span in zip(transferred, self._local.block_spans, strict=True):
            blocks.append(ids[: -(-num_tokens // span)])
        return tuple(blocks)

    def listed_blocks(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int, *, is_last: bool
    ) -> tuple[Sequence[int], ...]:
        """The blocks of the first `num_tokens` tokens of a request that a row lists, per transferred group.

        Args:
            is_last: whether the prompt is complete.
        """
        listed: list[Sequence[int]] = []
        groups = zip(
            self._local.groups,
            self._local.block_spans,
            self._held_at_the_end(num_tokens),
            self.blocks_of(block_ids, num_tokens),
            strict=True,
        )
        for group, span, first_held, ids in groups:
            if group.holds_every_token:
                listed.append(ids)
            elif not is_last:
                # Which blocks these are changes until the prompt is complete.
                listed.append([])
            elif group.policy == "state":
                listed.append([_last_not_null(ids)])
            else:
                listed.append(ids[first_held // span :])
        return tuple(listed)

    def _held_at_the_end(self, num_tokens: int) -> list[int]:
        """Per transferred group the first token that is surely held when a prompt is complete."""
        # Before the last part vLLM frees what no token of that part needs, and it has one token at least. Where there
        # are states, the blocks are held when the request has ended: by then vLLM has freed what the next token does
        # not need.
        next_token = num_tokens if self._local.has_states else num_tokens - 1
        first_held: list[int] = []
        for group, span in zip(
            self._local.groups, self._local.block_spans, strict=True
        ):
            if group.policy == "state":
                first = num_tokens - 1
            else:
                first = first_needed(group, next_token)
            first_held.append(first // span * span)
        return first_held

    def _signed(
        self,
        request_id: str,
        lease: ProducerLease,
        blocks: Blocks,
        num_tokens: int,
        digests: tuple[str, ...],
        *,
        row: int | None = None,
    ) -> RemotePrefill:
        """The signed params of a prompt that has these blocks, or that lists them in a row while it is computed."""
        if row is None:
            epoch = lease.name.epoch
            first_held: list[int] = []
            for span, ids in zip(self._local.block_spans, blocks, strict=True):
                first_held.append(held_from(span, len(ids), num_tokens))
        else:
            # If the stream restarts, its ticket stays the same.
            epoch = lease.origin.epoch
            first_held = self._held_at_the_end(num_tokens)
        ticket = Ticket(
            version=PARAMS_VERSION,
            boot=self._local.memory.boot,
            lease_slot=lease.slot,
            lease_epoch=epoch,
            lease_s=self._lease_s,
            digests=digests,
            mac=NO_MAC,
            held_from=tuple(first_held),
            stream_row=row,
        )
        unsigned = RemotePrefill(
            remote_engine_id=self._local.announced_id,
            remote_request_id=request_name(request_id),
            remote_block_ids=blocks,
            remote_host=self._local.host,
            remote_port=self._local.port,
            tp_size=self._local.topology.tp,
            pp_size=self._local.topology.pp,
            dcp_size=self._local.topology.dcp,
            remote_num_tokens=num_tokens,
            kvferry=ticket,
        )
        return sign_params(unsigned, self._local.memory.mac_key)

    def _transferable(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> Blocks:
        """The blocks of the first `num_tokens` tokens, without the null blocks of those that left their window."""
        transferable: list[tuple[int, ...]] = []
        for ids in self.blocks_of(block_ids, num_tokens):
            first = 0
            while first < len(ids) and ids[first] == NULL_BLOCK:
                first += 1
            transferable.append(tuple(ids[first:]))
        return tuple(transferable)


def _last_not_null(ids: Sequence[int]) -> int:
    for block in reversed(ids):
        if block != NULL_BLOCK:
            return block
    return NULL_BLOCK
