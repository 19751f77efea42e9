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
from kvferry.connector.scheduler_side.context import SchedulerContext
from kvferry.connector.scheduler_side.lease_eviction import LeaseEviction
from kvferry.connector.scheduler_side.monitor import EngineMonitor
from kvferry.connector.scheduler_side.request_life import RequestLife, RequestParts
from kvferry.connector.scheduler_side.stall_watch import StallWatch
from kvferry.connector.scheduler_side.undone_steps import UndoneSteps
from kvferry.protocol.orders import encode_head, encode_orders
from kvferry.scheduler.consumer.remote_prompt import (
    IN_FLIGHT,
    PromptKind,
    RemotePrompt,
    RemotePromptState,
)
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
        context: SchedulerContext,
        parts: RequestParts,
        life: RequestLife,
        *,
        undone: UndoneSteps,
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
        self._undone.scheduled(num_tokens, preempted)
        self._parts.tickets.scheduled(num_tokens, preempted, loads=loads)
        self._life.take_answers()
        # Before eviction: after idling, messages that claim leases are still in the inbox.
        self._parts.channel.receive()
        wants_report = self._parts.steps.begin()
        self._estimate.step_begins(num_tokens, total, time.monotonic())
        self._eviction.evict()
        # After eviction, which may need what prefixes would take.
        computes = bool(num_tokens)
        self._parts.prefix_leases.step(computes=computes)
        orders = next_orders(
            self._context.leases,
            self._context.loads,
            self._context.local.boot,
            time.monotonic(),
            self._parts.queries.take_failing(),
            # While the engine wakes, leases that were read during its sleep would count as expired.
            may_expire=not self._parts.steps.is_waking,
        )
        self._parts.admission.look_again()
        self._stalls.step(computes)
        is_idle = not computes and self._parts.steps.may_wait
        if not orders:
            if is_idle and not wants_report:
                self._parts.steps.wait_for_loads(len(self._context.requests))
            if not is_idle and not wants_report:
                return _NOTHING
            return FerryMetadata(wants_report=wants_report, is_idle=is_idle)
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
            state = self._context.loads.state(request_id)
            if state not in IN_FLIGHT:
                continue  # another child of a MultiConnector has loaded it
            if state is RemotePromptState.ABORTED and self._life.children_hold:
                # It is reported as blocks that were held and are not any more, see `RequestLife.ended`.
                output.finished_recving.discard(request_id)
            self._end_load(request_id, is_good=request_id not in failed)
        self._parts.admission.look_again()
        self._parts.channel.flush()

    def _apply_report(self, report: FerryWorkerMetadata) -> None:
        # First: vLLM frees the blocks of failed loads at once, and some may still be written.
        self._context.loads.quarantine.update(report.alive, time.monotonic())
        self._monitor.update(report.gauges)
        self._context.tracing.loads_reported(report.loads)
        for worker, ended in report.over.items():
            for request_id in self._context.leases.acknowledge(worker, ended):
                logger.debug("req=%s: its blocks are free", request_id)
        self._parts.steps.reported(report.over)

    def _measure_load(self, prompt: RemotePrompt, now_s: float) -> None:
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
        self._context.tracing.reported(request_id, good=is_good)
        if is_good:
            prompt = self._context.loads.loaded(request_id)
            if prompt is not None:
                now_s = time.monotonic()
                self._context.counters.sample("handover_s", now_s - prompt.offered_s)
                self._measure_load(prompt, now_s)
            return
        prompt = self._context.loads.failed(request_id)
        if prompt is not None and prompt.state is RemotePromptState.FAILED:
            # vLLM would do this when it looks at the request, which may stand behind one that lacks the blocks.
            self._context.blocks.free(self._context.requests.get(request_id).request)
