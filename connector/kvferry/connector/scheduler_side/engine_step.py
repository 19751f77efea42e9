"""One step of the engine as kvferry sees it: orders go to the workers with it, reports come back with it.

`begin` ends what has run out and collects the orders of both ledgers. `end` applies the reports before vLLM frees any
block of the step. Where steps overlap, the next one begins before this one ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from kvferry.connector.messages import FerryMetadata, FerryWorkerMetadata
from kvferry.connector.scheduler_side.admission import Admission
from kvferry.connector.scheduler_side.lease_eviction import LeaseEviction
from kvferry.connector.scheduler_side.monitor import EngineMonitor
from kvferry.connector.scheduler_side.prefix_leases import PrefixLeases
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.request_life import RequestLife
from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.scheduler_side.side_channel import SideChannel
from kvferry.connector.scheduler_side.stall_watch import StallWatch
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.scheduler_side.ticket_builder import TicketBuilder
from kvferry.connector.tracing.scheduler_events import SchedulerTracing
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.protocol.orders import encode_head, encode_orders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.pull_estimate import PullEstimate, StepPace
from kvferry.scheduler.consumer.remote_prompt import (
    IN_FLIGHT,
    PromptKind,
    RemotePrompt,
    RemotePromptState,
)
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.step import next_orders

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)

_NOTHING = FerryMetadata()
"""Most steps change nothing: their metadata is not made anew."""


class EngineStep:
    """Begins and ends the steps of one engine."""

    def __init__(
        self,
        requests: EngineRequests,
        life: RequestLife,
        *,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        blocks: EngineBlocks,
        queries: PromptQueries,
        admission: Admission,
        tickets: TicketBuilder,
        prefix_leases: PrefixLeases,
        eviction: LeaseEviction,
        stalls: StallWatch,
        steps: Steps,
        channel: SideChannel,
        monitor: EngineMonitor,
        tracing: SchedulerTracing,
        counters: Counters,
        pace: StepPace,
        estimate: PullEstimate,
    ) -> None:
        self._requests = requests
        self._life = life
        self._leases = leases
        self._loads = loads
        self._blocks = blocks
        self._queries = queries
        self._admission = admission
        self._tickets = tickets
        self._prefix_leases = prefix_leases
        self._eviction = eviction
        self._stalls = stalls
        self._steps = steps
        self._channel = channel
        self._monitor = monitor
        self._tracing = tracing
        self._counters = counters
        self._pace = pace
        self._estimate = estimate

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
        self._tickets.scheduled(num_tokens, preempted, loads=loads)
        self._life.take_answers()
        # Before eviction: after idling, messages that claim leases are still in the inbox.
        self._channel.receive()
        wants_report = self._steps.begin()
        ended = self._pace.begin(num_tokens, total, time.monotonic())
        if ended is not None:
            self._estimate.computed(*ended)
        self._eviction.evict()
        # After eviction, which may need what prefixes would take.
        computes = bool(num_tokens)
        self._prefix_leases.step(computes=computes)
        orders = next_orders(
            self._leases,
            self._loads,
            self._channel.local.boot,
            time.monotonic(),
            self._queries.take_failing(),
            # While the engine wakes, leases that were read during its sleep would count as expired.
            may_expire=not self._steps.is_waking,
        )
        self._admission.look_again()
        self._stalls.step(computes)
        is_idle = not computes and self._steps.may_wait
        if not orders:
            if is_idle and not wants_report:
                self._steps.wait_for_loads(len(self._requests))
            if not is_idle and not wants_report:
                return _NOTHING
            return FerryMetadata(wants_report=wants_report, is_idle=is_idle)
        self._tracing.progressed(orders.progress)
        self._tracing.ordered(orders.loads)
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
            not_filled = self._tickets.taken_back(output.invalid_block_ids)
            self._prefix_leases.taken_back(not_filled)
        failed = output.failed_recving or set()
        for request_id in failed:
            # Also the load of another child of a MultiConnector. That of a request that has ended is no one's.
            entry = self._requests.find(request_id)
            if entry is not None:
                self._admission.failed(entry)
        for request_id in tuple(output.finished_recving or ()):
            state = self._loads.state(request_id)
            if state not in IN_FLIGHT:
                continue  # another child of a MultiConnector has loaded it
            if state is RemotePromptState.ABORTED and self._life.children_hold:
                # It is reported as blocks that were held and are not any more, see `RequestLife.ended`.
                output.finished_recving.discard(request_id)
            self._end_load(request_id, is_good=request_id not in failed)
        self._admission.look_again()
        self._channel.flush()

    def _apply_report(self, report: FerryWorkerMetadata) -> None:
        # First: vLLM frees the blocks of failed loads at once, and some may still be written.
        self._loads.quarantine.update(report.alive, time.monotonic())
        self._monitor.update(report.gauges)
        self._tracing.loads_reported(report.loads)
        for worker, ended in report.over.items():
            for request_id in self._leases.acknowledge(worker, ended):
                logger.debug("req=%s: its blocks are free", request_id)
        self._steps.reported(report.over)

    def _measure_load(self, prompt: RemotePrompt, now_s: float) -> None:
        ticket = prompt.source.kvferry
        follows_prefill = ticket.stream_row is not None or ticket.opens_within_s > 0
        load_s = now_s - prompt.ordered_s
        if prompt.ordered_s and not follows_prefill:
            producer = (prompt.source.remote_host, prompt.source.remote_port)
            self._estimate.loaded(producer, prompt.loading_tokens, load_s, now_s)
        if prompt.kind is PromptKind.PREFIX:
            computing_s = self._estimate.compute_s(prompt.loading_tokens)
            self._counters.add("prefix_tokens_loaded", amount=prompt.loading_tokens)
            self._counters.sample("prefix_saved_s", max(0.0, computing_s - load_s))

    def _end_load(self, request_id: str, *, is_good: bool) -> None:
        self._tracing.reported(request_id, good=is_good)
        if is_good:
            prompt = self._loads.loaded(request_id)
            if prompt is not None:
                now_s = time.monotonic()
                self._counters.sample("handover_s", now_s - prompt.offered_s)
                self._measure_load(prompt, now_s)
            return
        prompt = self._loads.failed(request_id)
        if prompt is not None and prompt.state is RemotePromptState.FAILED:
            # vLLM would do this when it looks at the request, which may stand behind one that lacks the blocks.
            self._blocks.free(self._requests.get(request_id).request)
