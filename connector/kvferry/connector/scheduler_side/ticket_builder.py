"""Offers of this engine's blocks to other engines: when a request's blocks are held, and the params of its answer.

A prompt's blocks are held from the step on that completes it. The workers mark the end of that step, so consumers may
read as soon as the device has finished it, and vLLM can give none of the blocks away, whatever becomes of the request.
A prompt that a consumer has asked for is streamed from the next step on that computes a part of it: the workers get the
blocks of each part with its step, and report it when the step has ended. Those of windows, chunks and states follow
when the blocks are held.

A prefill is not always capped at one token. What it generates is its own: the offer is of the prompt, from the step on
that completes it. Holding the blocks at its end instead would name the answer's tokens too, which the decoder's prompt
lacks, and lack what has left a window since.

A model with recurrent states moves them between blocks when a request ends, so there, as for turns, they are held from
then on. Such a prefill is always capped (`leave_out`).

As long as vLLM may take back what a request's first step has computed (`unsettled.py`), nothing of the request is
published, and no ticket is given. If that step completes the prompt, the blocks are held from its next step on, or from
its end, whichever comes first: it gets there only if vLLM has kept the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.scheduler_side.params_builder import ParamsBuilder, prompt_of
from kvferry.connector.scheduler_side.unsettled import UnsettledRequests, first_of
from kvferry.connector.vllm.blocks import EngineBlocks, distinct_blocks
from kvferry.connector.vllm.requests import cached_tokens_of, has_ended_well
from kvferry.protocol.digests import GrowingChain
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.params_mac import sign_early
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.lease import LeaseState, LeaseUse, ProducerLease, PublishedStream
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.producer.prompt_directory import PromptDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

_OPENS_WITHIN_S = 10.0
"""The workers get the orders of a step when the one before it has run, if steps overlap; a ticket is given earlier."""

_READ_OR_HELD = ("", "done")
"""`ProducerLease.ended_by` of a lease that has not ended, or that a consumer has read already."""


IssuedTicket = tuple[RemotePrefill, ProducerLease]


@dataclass(slots=True)
class _Prefill:
    """A prompt for another engine that is not complete.

    Attributes:
        chain: its digests so far: all of a long prompt's would take too long in one step. None for embeddings.
        is_refused: whether it is asked for and cannot be streamed.
        cached_tokens: see `Answer`; vLLM's own count of it is gone when the request ends.
    """

    request: Request
    chain: GrowingChain | None
    is_refused: bool = False
    cached_tokens: int | None = None

    def digests(self, num_tokens: int) -> tuple[str, ...]:
        """Of the first tokens; empty for embeddings."""
        return self.chain.digests(num_tokens) if self.chain is not None else ()


class TicketBuilder:
    """The offers of one engine.

    Args:
        directory: the prompts that other engines may ask for.
        counters: counts `streams_refused`.
        max_steps: the most steps in flight.
        streams: whether prompts can be read while they are computed.

    Attributes:
        builder: of the params.
    """

    def __init__(
        self,
        local: LocalEngine,
        leases: ProducerLedger,
        blocks: EngineBlocks,
        builder: ParamsBuilder,
        directory: PromptDirectory,
        counters: Counters,
        *,
        max_steps: int,
        streams: bool,
    ) -> None:
        self.builder = builder
        self._directory = directory
        self._leases = leases
        self._blocks = blocks
        self._local = local
        self._mac_key = local.mac_key
        self._holds_early = not local.has_states
        self._counters = counters
        self._streams = streams
        self._unsettled = UnsettledRequests(max_steps)
        self._prefilling: dict[str, _Prefill] = {}
        self._built: dict[str, IssuedTicket] = {}

    def opened(self, request: Request) -> None:
        """The request is scheduled, for the first time or again, and its lease has a slot."""
        self._unsettled.admitted(request.request_id)
        lease = self._leases.running(request.request_id)
        if lease is None:
            self._directory.over(request.request_id, "no_lease")
            return
        # Also if it may generate more than one token: its prompt is all that a decoder can compare with its own.
        if lease.use is LeaseUse.PROMPT:
            prompt = prompt_of(request, request.num_prompt_tokens, self._local)
            chain = GrowingChain(prompt) if prompt is not None else None
            prefill = self._prefilling.setdefault(request.request_id, _Prefill(request, chain))
            prefill.cached_tokens = cached_tokens_of(request)

    def reset(self) -> None:
        """The weights have changed or are about to: a prompt that begins anew gets other digests."""
        self._prefilling.clear()

    def scheduled(
        self, num_tokens: Mapping[str, int], preempted: Collection[str], *, loads: bool
    ) -> None:
        """Hold the blocks of the prompts that this step completes, and publish those of streamed ones.

        Args:
            num_tokens: of each request, in this step.
            preempted: requests whose blocks were freed since the last step.
            loads: whether another connector loads within this step.
        """
        self._unsettled.begin_step(loads=loads)
        for request_id in filter(self._unsettled.__contains__, num_tokens):
            self._unsettled.computes(request_id, self._blocks.table(request_id)[0])
        for request_id in self._built.keys() & preempted:
            self._leases.start_deadline(
                self._built[request_id][1]
            )  # the request may be computed again late, or never
        for request_id, prefill in list(self._prefilling.items()):
            lease = self._leases.running(request_id)
            if lease is None:
                del self._prefilling[request_id]
            elif lease.state is LeaseState.COMPUTING:
                self._advance(
                    prefill, lease, num_tokens.get(request_id, 0), request_id in preempted
                )

    def taken_back(self, invalid: set[int], requests: Mapping[str, Request]) -> None:
        """vLLM has heard that these blocks were not filled, and has put back the counts of the requests that have them.

        Of requests that share such a block, vLLM has only one compute it again, and lets the others go on as if it were
        done already. That one may be late, be preempted or aborted, so the others are served without a lease. And it
        leaves the blocks in the prefix cache meanwhile, where later prompts would hit them: they are taken out.

        Args:
            requests: those that have not ended.
        """
        not_filled = invalid.union(*self._unsettled.relying_on(invalid))
        for request in requests.values():
            table = self._blocks.table(request.request_id)[
                0
            ]  # vLLM refuses such a report where there are more groups
            first = first_of(invalid, table)
            if first is None:
                continue
            not_filled.update(table[first:])
            if request.num_computed_tokens > first * self._local.block_spans[0]:
                self._give_up(request.request_id)
        for lease in self._leases.leases(LeaseState.HELD):
            if not not_filled.isdisjoint(lease.block_ids):
                self._leases.end(lease, "abandoned")
        self._blocks.forget_hits(not_filled)

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> IssuedTicket | None:
        """The request has ended: the params of its blocks, which are held, and the lease; None if they are not."""
        prefill = self._prefilling.pop(request.request_id, None)
        if request.request_id in self._built:
            offer = self._complete_prompt(request)
        else:
            offer = self._finish(request, block_ids, prefill)
            if offer is not None:
                cached_tokens = prefill.cached_tokens if prefill is not None else None
                self._directory.ticket(request.request_id, *offer, cached_tokens=cached_tokens)
        reason = "no_lease" if has_ended_well(request) else "ended"
        self._directory.finished(request.request_id, reason if offer is None else "")
        return offer

    def _give_up(self, request_id: str) -> None:
        """What a request computes may not be read; it is answered all the same."""
        lease = self._leases.running(request_id)
        if lease is not None and lease.state is LeaseState.COMPUTING:
            self._leases.abandon(request_id)
            self._directory.over(request_id, "no_lease")

    def _finish(
        self, request: Request, block_ids: Sequence[Sequence[int]], prefill: _Prefill | None
    ) -> IssuedTicket | None:
        lease = self._leases.running(request.request_id)
        if lease is None:
            return None
        # Of what vLLM has taken back, and of what it has not answered yet, nothing counts here.
        num_tokens = self.builder.num_complete_tokens(request, lease.use)
        if lease.use is LeaseUse.PROMPT:
            num_tokens = min(
                num_tokens, request.num_prompt_tokens
            )  # one may have ended unsettled with an answer
        is_whole = num_tokens == request.num_prompt_tokens
        # A stream that an unsettled step has completed: its ticket may promise a block of a window that vLLM has freed.
        is_late = lease.stream is not None and (self._holds_early or not is_whole)
        if is_late:
            self._leases.abandon(request.request_id)
            return None
        if lease.stream is not None:
            self._publish(lease, lease.stream, block_ids, num_tokens, is_last=True)
        digests = prefill.digests(num_tokens) if prefill is not None and is_whole else ()
        params = self.builder.build(
            request, block_ids, num_tokens, lease, self._leases.lease_s, digests
        )
        if params is None:
            self._leases.abandon(request.request_id)
            return None
        self._leases.finish(
            request.request_id, self.builder.worker_blocks(params), distinct_blocks(block_ids)
        )
        return params, lease

    def _complete_prompt(self, request: Request) -> IssuedTicket | None:
        offer = _, lease = self._built.pop(request.request_id)
        self._leases.request_ended(lease)
        if not has_ended_well(request) and not lease.ended_by:
            self._leases.end(lease, "abandoned")
        return offer if lease.ended_by in _READ_OR_HELD else None

    def _advance(
        self, prefill: _Prefill, lease: ProducerLease, num_tokens: int, is_preempted: bool
    ) -> None:
        """This step computes so many tokens of a prompt, or none."""
        request, stream = prefill.request, lease.stream
        if stream is not None and (is_preempted or request.num_computed_tokens < stream.tokens):
            self._leases.streams.restart(lease, stream)
        if not num_tokens:
            return
        num_complete = min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens)
        if request.request_id not in self._unsettled:
            self._offer_step(prefill, lease, num_complete)
        if request.request_id in self._prefilling and prefill.chain is not None:
            prefill.chain.grow(
                min(num_complete + num_tokens, request.num_prompt_tokens)
            )  # a step ahead

    def _offer_step(self, prefill: _Prefill, lease: ProducerLease, num_complete: int) -> None:
        """So many tokens of a prompt are complete when this step has ended, and vLLM will take none of them back."""
        request, stream = prefill.request, lease.stream
        if stream is not None and request.num_computed_tokens >= request.num_prompt_tokens:
            self._give_up(request.request_id)  # an unsettled step has completed it: see `_finish`
            return
        is_complete = num_complete == request.num_prompt_tokens
        if stream is None and not is_complete:
            stream = self._begin_stream(prefill, lease)
        is_held = is_complete and self._holds_early
        if stream is not None:
            self._publish(
                lease, stream, self._blocks.table(request.request_id), num_complete, is_last=is_held
            )
        if is_held:
            del self._prefilling[request.request_id]
            self._complete(prefill, lease)

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
            self._leases.streams.restart(lease, stream)
        self._leases.streams.publish(lease, stream, num_tokens, blocks)

    def _begin_stream(self, prefill: _Prefill, lease: ProducerLease) -> PublishedStream | None:
        """Give a consumer that has asked for the prompt a ticket for what is computed of it."""
        request = prefill.request
        directory = None if prefill.is_refused else self._directory.waiting(request.request_id)
        if directory is None or prefill.chain is None:
            return None
        stream = None
        if not (self._streams and directory.spans):
            self._counters.add("streams_refused", "consumer" if self._streams else "engine")
        elif not self.builder.windows_reach(
            request.num_prompt_tokens, directory.num_tokens, directory.spans
        ):
            self._counters.add("streams_refused", "window")
        elif (stream := self._leases.streams.begin(lease)) is not None:
            prefill.chain.know(
                directory.digests, request.num_prompt_tokens
            )  # it was asked for with those left out here
            digests = prefill.digests(request.num_prompt_tokens)
            params = self.builder.build_stream(
                request, lease, stream.row, digests, self._leases.lease_s
            )
            self._give_ticket(prefill, params, lease)
        prefill.is_refused = stream is None
        return stream

    def _complete(self, prefill: _Prefill, lease: ProducerLease) -> None:
        request = prefill.request
        block_ids, num_tokens = self._blocks.table(request.request_id), request.num_prompt_tokens
        digests = prefill.digests(num_tokens)
        params = self.builder.build(
            request, block_ids, num_tokens, lease, self._leases.lease_s, digests
        )
        if params is not None:
            self._leases.complete(
                request.request_id, self.builder.worker_blocks(params), distinct_blocks(block_ids)
            )
            self._built[request.request_id] = params, lease
            self._give_ticket(prefill, params, lease)

    def _give_ticket(self, prefill: _Prefill, params: RemotePrefill, lease: ProducerLease) -> None:
        """For a prompt that this step, or a later one, completes."""
        ticket = sign_early(params, self._mac_key, _OPENS_WITHIN_S)
        self._directory.ticket(
            prefill.request.request_id, ticket, lease, cached_tokens=prefill.cached_tokens
        )
