"""What vLLM's scheduler hooks mean for all parts of the scheduler side: those of a request, and those of a step.

    a request   arrived ──► matched_tokens (again and again while it waits) ──► admitted (again after a preemption)
                        ──► ended
    a step      begin: end what has run out, collect the orders of both ledgers for the workers
                end: apply their reports, before vLLM frees any block of the step

`ended` is the only end of a request. Its record goes with it; what outlives the request (a held lease, an aborted load)
is the ledgers'. Where steps overlap, the next one begins before this one ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.connector.messages import FerryMetadata, FerryWorkerMetadata
from kvferry.connector.metrics.stats import EngineMonitor
from kvferry.connector.scheduler_side.admission import (
    Admission,
    BlockDemand,
    LeaseEviction,
    StallWatch,
)
from kvferry.connector.scheduler_side.intake import RequestIntake
from kvferry.connector.scheduler_side.prefixes import PrefixIntake, PrefixLeases
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.requests import EngineRequest, SchedulerContext
from kvferry.connector.scheduler_side.side_channel import SideChannel
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.scheduler_side.taken_back import UndoneSteps
from kvferry.connector.scheduler_side.tickets import TicketBuilder
from kvferry.connector.vllm.scheduler import has_ended_by_error, local_hit_of
from kvferry.protocol.orders import StepOrders, encode_head, encode_orders
from kvferry.scheduler.requests import (
    IN_FLIGHT,
    LeaseState,
    LeaseUse,
    PromptKind,
    RemotePrompt,
    RemotePromptState,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParts:
    """The parts that hear of the events of a request, or that a step asks about requests.

    Attributes:
        intake: decides how a request is served.
        queries, pulls: wait for what other engines say, about its prompt and about its prefix.
        demand, admission: the blocks that it lacks, and whether vLLM must skip it.
        tickets, prefix_leases: what other engines may read of it.
        steps: whether the engine rests.
        channel: takes commands to other engines.
    """

    intake: RequestIntake
    queries: PromptQueries
    pulls: PrefixIntake
    demand: BlockDemand
    admission: Admission
    tickets: TicketBuilder
    prefix_leases: PrefixLeases
    steps: Steps
    channel: SideChannel


class RequestLife:
    """Passes the events of requests to the parts, in the order that they need.

    Attributes:
        children_hold: whether another child of a MultiConnector may hold the blocks of a request that is aborted while
            it is loaded.
    """

    def __init__(self, context: SchedulerContext, parts: RequestParts) -> None:
        self.children_hold = False
        self._context = context
        self._parts = parts

    def arrived(self, request: Request) -> None:
        """Read the request's params before vLLM does."""
        self._parts.intake.receive(self._context.requests.add(request))
        self._parts.channel.flush()

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int | None:
        """Tokens beyond the local prefix hit that can be loaded; None makes vLLM ask again in the next step."""
        entry = self._context.requests.enter(request)
        if any(self._parts.queries.unsettled):
            self._wait_for_answer(entry, num_local_tokens)
            if entry.record.waits_for_answer:
                return None
        if entry.must_fail:
            return 1
        if self._may_get_slot_soon(entry):
            return None
        prompt = entry.record.prompt
        is_offered = prompt is not None and prompt.state is RemotePromptState.OFFERED
        # Another child's load is not in this ledger.
        if self._parts.admission.must_wait(
            entry, may_load=is_offered or self.children_hold
        ):
            return None
        num_matched = self._context.loads.matched_tokens(
            entry.request_id, num_local_tokens
        )
        if num_matched and self._parts.admission.loads_nothing(entry):
            self._context.loads.compute_here(entry.request_id, "blocks_pinned")
            self._parts.channel.flush()
            return 0
        return num_matched

    def admitted(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM has allocated blocks for the request. It is told so twice if the request loads, before and after."""
        entry = self._context.requests.enter(request)
        if not request.num_preemptions:
            # One that was preempted had been admitted before: others may be waiting as long as ever.
            self._parts.demand.end_stall()
        self._parts.admission.left_queue(entry)
        self._open_lease(entry)
        self._parts.tickets.admitted(entry)
        self._parts.prefix_leases.admitted(entry)
        if entry.own_lease is not None or entry.session is not None:
            self._parts.intake.admitted(entry)
        if entry.must_fail:
            self._parts.queries.admitted(entry, num_external_tokens)
        prompt = entry.record.prompt
        if prompt is not None:
            if not num_external_tokens and prompt.state is RemotePromptState.OFFERED:
                prompt.local_tokens = max(prompt.local_tokens, local_hit_of(request))
            self._order_load(prompt, blocks, num_external_tokens)
            self._parts.channel.flush()

    def ended(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended.

        Returns:
            Whether vLLM must hold its blocks, and the params of its response.
        """
        entry = self._context.requests.ended(request.request_id)
        if entry is None:
            return False, None
        # vLLM holds an aborted load's blocks itself until the load is reported, except under a MultiConnector. There it
        # would free them at the first of two reports, the load's end and the other child's, and end the engine at the
        # second. So this connector holds them too, and reports the end as that child does (`EngineStep.end`).
        is_loading = self._context.loads.finished(
            entry.request_id, by_error=has_ended_by_error(request)
        )
        must_hold = is_loading and self.children_hold
        if self.children_hold and entry.request_id in self._parts.queries.unreported:
            # To vLLM it is loading as well, see `PromptQueries.fail`.
            self._context.loads.cancel(entry.request_id)
            must_hold = True
        if any(self._parts.queries.unsettled):
            self._parts.queries.ended(entry)
        self._parts.demand.end_stall()
        self._parts.admission.left_queue(entry)
        if self._context.tracing is not None:
            self._context.tracing.finished(entry.request_id)
        if entry.own_lease is not None or entry.session is not None:
            self._parts.intake.ended(entry)
        self._parts.prefix_leases.ended(entry)
        self._parts.channel.flush()
        if self._parts.steps.drain.has_begun:
            self._end_turn(entry)
        # A lease's blocks are not held by vLLM: the request would stay in its scheduler, and as long as it does the
        # engine steps every millisecond, on more than one core. So the lease has references of its own on them.
        ticket = self._parts.tickets.ended(entry, block_ids)
        if ticket is None:
            return must_hold, None
        params, lease = ticket
        logger.debug(
            "req=%s slot=%d holds %d tokens",
            entry.request_id,
            lease.slot,
            params.remote_num_tokens,
        )
        if self._context.tracing is not None:
            self._context.tracing.params_given(entry.request_id, params, lease)
        is_turn = lease.use is LeaseUse.TURN
        may_send_both_legs = self._parts.channel.announces and not is_turn
        return False, params.to_json(is_turn=is_turn, at_once=may_send_both_legs)

    def reset(self) -> bool:
        """The weights have changed or are about to: caches of the old weights must not be used with the new ones.

        Returns:
            Whether the reset is complete. While loads are in flight it is not, and vLLM must call again.
        """
        # Through the fence, like every end: a read that is under way is not believed.
        self._context.leases.release_all("reset")
        self._parts.tickets.reset()
        self._parts.prefix_leases.reset()
        self._context.local.adapters.reset()
        for lease in self._context.leases.leases(
            LeaseState.INTENDED, LeaseState.COMPUTING
        ):
            self._context.leases.abandon(lease.request_id, "reset")
            # A running request keeps its computed tokens, so it offers nothing at its end. One without any, or a
            # preempted one, gets a lease with a new epoch when it begins.
            entry = self._context.requests.get(lease.request_id)
            if not entry.request.num_computed_tokens:
                self._context.leases.intend(lease.request_id, lease.use)
        # Their producer's blocks are of the old weights.
        self._context.loads.decline_offered("reset")
        self._parts.channel.flush()
        return not self._context.loads.requests(*IN_FLIGHT)

    def end_leases(self) -> bool:
        """vLLM's cache is about to be reset, whatever uses it. Returns whether any block is leased still."""
        leases = self._context.leases
        leases.release_all("reset")
        self._parts.prefix_leases.reset()
        leases.block_references.return_all()
        return bool(leases.block_references.num_requests)

    def take_answers(self) -> None:
        """Apply the answers to queries: their requests load with the ticket, or are computed here."""
        if any(self._parts.queries.unsettled):
            for settled in self._parts.queries.take():
                entry = self._context.requests.find(settled.request_id)
                self._parts.intake.answered(settled, entry)
            self._parts.pulls.take()
        self._parts.channel.flush()

    def _wait_for_answer(self, entry: EngineRequest, num_local_tokens: int) -> None:
        """Take answers for a request, and wait for one to it as long as the engine has nothing else to do."""
        # Before the wait: a request does not wait for tokens that its own cache has.
        if entry.record.search is not None:
            self._parts.pulls.looked_at(entry, num_local_tokens)
        if not entry.record.waits_for_answer:
            return
        self.take_answers()
        while entry.record.waits_for_answer:
            if not self._parts.steps.wait_for_answers(len(self._context.requests)):
                return
            self.take_answers()

    def _may_get_slot_soon(self, entry: EngineRequest) -> bool:
        """True if the request needs a lease, no slot is free, and one may be in a step or two."""
        lease = entry.record.lease
        is_intended = lease is not None and lease.state is LeaseState.INTENDED
        if not is_intended or self._context.leases.slots.free:
            return False
        return self._parts.steps.may_report_ended_leases

    def _open_lease(self, entry: EngineRequest) -> None:
        lease = entry.record.lease
        if lease is None or lease.state is not LeaseState.INTENDED:
            return
        if not self._context.leases.open(entry.request_id):
            logger.warning(
                "req=%s is served without a lease: all %d slots are used",
                entry.request_id,
                self._context.leases.slots.count,
            )

    def _order_load(
        self, prompt: RemotePrompt, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        was_offered = prompt.state is RemotePromptState.OFFERED
        local_blocks: tuple[Sequence[int], ...] = ()
        if num_external_tokens:
            local_blocks = self._parts.tickets.builder.load_blocks(
                blocks.get_block_ids(), prompt.shared_tokens
            )
        self._context.loads.allocated(
            prompt.request_id, num_external_tokens, local_blocks
        )
        if was_offered and prompt.state is RemotePromptState.LOADING:
            prompt.ordered_s = time.monotonic()
            self._context.counters.sample(
                "order_wait_s", prompt.ordered_s - prompt.offered_s
            )

    def _end_turn(self, entry: EngineRequest) -> None:
        """An engine that shuts down offers no answers any more: nobody will come for them."""
        lease = self._context.leases.running(entry.request_id)
        if lease is not None and lease.use is LeaseUse.TURN:
            self._context.leases.abandon(entry.request_id)


_NOTHING = FerryMetadata()
"""Most steps change nothing: their metadata is not made anew."""


class EngineStep:
    """Begins and ends the steps of one engine."""

    def __init__(
        self,
        context: SchedulerContext,
        parts: RequestParts,
        life: RequestLife,
        *,
        undone: UndoneSteps | None,
        eviction: LeaseEviction,
        stalls: StallWatch,
        monitor: EngineMonitor,
    ) -> None:
        self._context = context
        self._parts = parts
        self._life = life
        self._undone = undone
        self._eviction = eviction
        self._stalls = stalls
        self._monitor = monitor
        self._estimate = parts.pulls.estimate

    def begin(
        self,
        num_tokens: Mapping[str, int],
        preempted: Collection[str],
        *,
        total: int,
        loads: bool,
    ) -> FerryMetadata:
        """vLLM has scheduled a step: all changes since the last one, for the workers.

        Args:
            num_tokens: scheduled in this step, by request.
            preempted: requests whose blocks were freed since the last step, and may be other requests' in this one.
            total: the sum of `num_tokens`, which vLLM knows.
            loads: whether another connector loads within this step.
        """
        if self._undone is not None:
            self._undone.scheduled(num_tokens, preempted)
        self._parts.tickets.scheduled(num_tokens, preempted, loads=loads)
        self._life.take_answers()
        # Before eviction: after idling, messages that claim leases are still in the inbox.
        self._parts.channel.receive()
        wants_report = self._parts.steps.begin()
        if self._context.local.asks_prefixes:
            self._estimate.step_begins(num_tokens, total, time.monotonic())
        self._eviction.evict()
        # After eviction, which may need what prefixes would take.
        computes = bool(num_tokens)
        self._parts.prefix_leases.step(computes=computes)
        failing = self._parts.queries.failing
        orders = StepOrders.join(
            self._context.local.boot,
            self._context.leases.take_orders(
                time.monotonic(),
                # While the engine wakes, leases that were read during its sleep would count as expired.
                may_expire=not self._parts.steps.is_waking,
            ),
            self._context.loads.take_orders(),
            tuple(failing),
        )
        failing.clear()
        self._parts.admission.look_again()
        self._stalls.step(computes)
        is_idle = not computes and self._parts.steps.may_wait
        if not orders:
            if is_idle and not wants_report:
                self._parts.steps.wait_for_loads(len(self._context.requests))
            if not is_idle and not wants_report:
                return _NOTHING
            return FerryMetadata(wants_report=wants_report, is_idle=is_idle)
        if self._context.tracing is not None:
            self._context.tracing.progressed(orders.progress)
            self._context.tracing.ordered(orders.loads)
        # Encoded here, once for all workers: vLLM would pickle them for each.
        return FerryMetadata(
            encode_head(orders), encode_orders(orders), wants_report, is_idle
        )

    def end(self, output: KVConnectorOutput) -> None:
        """Apply what vLLM has gathered of all workers. Ended loads are taken out of it where vLLM must not see them."""
        report = output.kv_connector_worker_meta
        if isinstance(report, FerryWorkerMetadata):
            self._apply_report(report)
        if output.invalid_block_ids:
            not_filled = self._parts.tickets.taken_back(output.invalid_block_ids)
            self._parts.prefix_leases.taken_back(not_filled)
        failed = output.failed_recving or set()
        for request_id in failed:
            # Also the load of another child of a MultiConnector. That of a request that has ended is no one's.
            entry = self._context.requests.find(request_id)
            if entry is not None:
                self._parts.admission.failed(entry)
        for request_id in tuple(output.finished_recving or ()):
            if request_id in self._parts.queries.unreported:
                self._failure_reported(request_id, output)
                continue
            prompt = self._context.loads.get(request_id)
            if prompt is None or prompt.state not in IN_FLIGHT:
                continue  # another child of a MultiConnector has loaded it
            was_aborted = prompt.state is RemotePromptState.ABORTED
            if was_aborted and self._life.children_hold:
                # It is reported as blocks that were held and are not any more, see `RequestLife.ended`.
                output.finished_recving.discard(request_id)
            self._end_load(request_id, is_good=request_id not in failed)
        self._parts.admission.look_again()
        self._parts.channel.flush()

    def _failure_reported(self, request_id: str, output: KVConnectorOutput) -> None:
        """The workers have reported a request that `PromptQueries.fail` had them report."""
        self._parts.queries.unreported.discard(request_id)
        has_ended = self._context.requests.find(request_id) is None
        if has_ended and self._life.children_hold:
            output.finished_recving.discard(request_id)  # as that of an aborted load

    def _apply_report(self, report: FerryWorkerMetadata) -> None:
        if report.still_written:
            # First: vLLM frees the blocks of failed loads at once, and some may still be written.
            self._context.loads.quarantine.update(
                report.still_written, time.monotonic()
            )
        self._monitor.workers.update(report.gauges)
        if self._context.tracing is not None:
            self._context.tracing.loads_reported(report.loads)
        for worker, sent in report.sent.items():
            for request_id in self._context.leases.acknowledge(worker, sent):
                logger.debug("req=%s: its blocks are free", request_id)
        self._parts.steps.unreported.difference_update(report.sent)

    def _measure_load(self, prompt: RemotePrompt, now_s: float) -> None:
        """What a good load says about the pull of a prefix, and what this one has saved if it was one."""
        ticket = prompt.source.kvferry
        follows_prefill = ticket.stream_row is not None or ticket.opens_within_s > 0
        load_s = now_s - prompt.ordered_s
        if prompt.ordered_s and not follows_prefill:
            producer = (prompt.source.remote_host, prompt.source.remote_port)
            self._estimate.loaded(producer, prompt.loading_tokens, load_s, now_s)
        if prompt.kind is PromptKind.PREFIX:
            computing_s = self._estimate.compute_s(prompt.loading_tokens)
            self._context.counters.add(
                "prefix_tokens_loaded", amount=prompt.loading_tokens
            )
            self._context.counters.sample(
                "prefix_saved_s", max(0.0, computing_s - load_s)
            )

    def _end_load(self, request_id: str, *, is_good: bool) -> None:
        if self._context.tracing is not None:
            self._context.tracing.reported(request_id, good=is_good)
        if is_good:
            prompt = self._context.loads.loaded(request_id)
            if prompt is not None:
                now_s = time.monotonic()
                self._context.counters.sample("handover_s", now_s - prompt.offered_s)
                if self._context.local.asks_prefixes:
                    self._measure_load(prompt, now_s)
            return
        prompt = self._context.loads.failed(request_id)
        if prompt is not None and prompt.state is RemotePromptState.FAILED:
            # vLLM would do this when it looks at the request, which may stand behind one that lacks the blocks.
            self._context.blocks.free(self._context.requests.get(request_id).request)
