"""The metadata of one step: all changes since the last one, for the workers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from kvferry.connector.messages import FerryMetadata
from kvferry.connector.scheduler_side.admission import Admission
from kvferry.connector.scheduler_side.lease_eviction import LeaseEviction
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.request_life import RequestLife
from kvferry.connector.scheduler_side.requests import EngineRequests
from kvferry.connector.scheduler_side.side_channel import SideChannel
from kvferry.connector.scheduler_side.stall_watch import StallWatch
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.scheduler_side.ticket_builder import TicketBuilder
from kvferry.connector.tracing.scheduler_events import SchedulerTracing
from kvferry.protocol.orders import encode_head, encode_orders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.step import next_orders

_NOTHING = FerryMetadata()
"""Most steps change nothing: their metadata is not made anew."""


class MetadataBuilder:
    """Ends what has run out, and collects the orders of both ledgers."""

    def __init__(
        self,
        requests: EngineRequests,
        life: RequestLife,
        *,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        queries: PromptQueries,
        admission: Admission,
        tickets: TicketBuilder,
        eviction: LeaseEviction,
        stalls: StallWatch,
        steps: Steps,
        channel: SideChannel,
        tracing: SchedulerTracing,
    ) -> None:
        self._requests = requests
        self._life = life
        self._leases = leases
        self._loads = loads
        self._queries = queries
        self._admission = admission
        self._tickets = tickets
        self._eviction = eviction
        self._stalls = stalls
        self._steps = steps
        self._channel = channel
        self._tracing = tracing

    def build(
        self, num_tokens: Mapping[str, int], preempted: Collection[str], *, loads: bool
    ) -> FerryMetadata:
        """The metadata of a step that vLLM has scheduled.

        Args:
            num_tokens: scheduled in this step, by request.
            preempted: requests whose blocks were freed since the last step, and may be other requests' in this one.
            loads: whether another connector loads within this step.
        """
        self._tickets.scheduled(num_tokens, preempted, loads=loads)
        self._life.take_answers()
        # Before eviction: after idling, messages that claim leases are still in the inbox.
        self._channel.receive()
        wants_report = self._steps.begin()
        self._eviction.evict()
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
        computes = bool(num_tokens)
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
        return FerryMetadata(encode_head(orders), encode_orders(orders), wants_report, is_idle)
