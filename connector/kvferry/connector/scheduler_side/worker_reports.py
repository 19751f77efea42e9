"""The workers' reports of one step, applied to the ledgers before vLLM frees any block of the step."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvferry.connector.messages import FerryWorkerMetadata
from kvferry.connector.scheduler_side.admission import Admission
from kvferry.connector.scheduler_side.monitor import EngineMonitor
from kvferry.connector.scheduler_side.request_life import RequestLife
from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.scheduler_side.side_channel import SideChannel
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.scheduler_side.ticket_builder import TicketBuilder
from kvferry.connector.tracing.scheduler_events import SchedulerTracing
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import IN_FLIGHT, RemotePromptState
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.ledger import ProducerLedger

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)


class WorkerReports:
    """Applies them."""

    def __init__(
        self,
        requests: EngineRequests,
        life: RequestLife,
        *,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        blocks: EngineBlocks,
        admission: Admission,
        tickets: TicketBuilder,
        steps: Steps,
        channel: SideChannel,
        monitor: EngineMonitor,
        tracing: SchedulerTracing,
        counters: Counters,
    ) -> None:
        self._requests = requests
        self._life = life
        self._leases = leases
        self._loads = loads
        self._blocks = blocks
        self._admission = admission
        self._tickets = tickets
        self._steps = steps
        self._channel = channel
        self._monitor = monitor
        self._tracing = tracing
        self._counters = counters

    def apply(self, output: KVConnectorOutput) -> None:
        """Apply what vLLM has gathered of all workers. Ended loads are taken out of it where vLLM must not see them."""
        report = output.kv_connector_worker_meta
        if isinstance(report, FerryWorkerMetadata):
            self._apply_report(report)
        if output.invalid_block_ids:
            self._tickets.taken_back(output.invalid_block_ids)
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

    def _end_load(self, request_id: str, *, is_good: bool) -> None:
        self._tracing.reported(request_id, good=is_good)
        if is_good:
            prompt = self._loads.loaded(request_id)
            if prompt is not None:
                self._counters.sample("handover_s", time.monotonic() - prompt.offered_s)
            return
        prompt = self._loads.failed(request_id)
        if prompt is not None and prompt.state is RemotePromptState.FAILED:
            # vLLM would do this when it looks at the request, which may stand behind one that lacks the blocks.
            self._blocks.free(self._requests.get(request_id).request)
