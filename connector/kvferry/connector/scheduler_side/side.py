"""The connector in the scheduler's process: connects vLLM's hooks to the two ledgers and the side channel."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kvferry.connector.allowed_hosts import TrustedHosts, allowed_hosts_of
from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.facts import (
    can_stream,
    facts_of,
    has_no_dp_siblings,
    lease_slots,
    num_workers,
    sibling_ports,
    uses_host_buffer,
)
from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.connector.messages import FerryMetadata, FerryWorkerMetadata
from kvferry.connector.scheduler_side.admission import Admission
from kvferry.connector.scheduler_side.drain import Drain
from kvferry.connector.scheduler_side.intake import RequestIntake
from kvferry.connector.scheduler_side.lease_eviction import LeaseEviction
from kvferry.connector.scheduler_side.monitor import EngineMonitor
from kvferry.connector.scheduler_side.params_builder import ParamsBuilder
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.side_channel import SideChannel
from kvferry.connector.scheduler_side.stall_watch import StallWatch
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.connector.scheduler_side.ticket_builder import TicketBuilder
from kvferry.connector.tracing.scheduler_events import scheduler_tracing
from kvferry.connector.vllm.blocks import EngineBlocks
from kvferry.connector.vllm.loop import EngineLoop
from kvferry.connector.vllm.requests import has_ended_by_error
from kvferry.protocol.load_notifier import LoadListener
from kvferry.protocol.orders import encode_head, encode_orders
from kvferry.protocol.side_channel.secrets import secrets_from_environment
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import IN_FLIGHT, LoadState
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.lease import LeaseState, LeaseUse
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from kvferry.scheduler.step import next_orders

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NOTHING = FerryMetadata()


class SchedulerSide:
    """The scheduler side of one engine.

    Attributes:
        leases, loads: the two ledgers.
        blocks: the engine's, once vLLM has bound its KV cache manager.
        eviction: ends held leases when blocks are needed, and whether blocks are coming (`is_coming`).
        steps: when the engine steps, waits and wakes.
        monitor: the metrics and the integrity check.
        channel: the side channel, which publishes the workers' descriptions.

    Raises:
        InvalidConfig: the side channel's address is in use, its secrets are invalid, or a cache cannot be described.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig
    ) -> None:
        secrets = secrets_from_environment()
        local = LocalEngine.from_vllm_config(vllm_config, kv_cache_config, config)
        self._local = local
        counters, workers = Counters(), num_workers(local.topology)
        self.blocks = EngineBlocks()
        self.leases = ProducerLedger(
            lease_slots(config, vllm_config),
            config.kv_lease_duration,
            counters,
            turn_s=config.decoder_kv_blocks_ttl,
            workers=workers,
            pool=self.blocks,
        )
        recomputes = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self.loads = ConsumerLedger(
            counters,
            config.kv_recompute_threshold,
            pool=self.blocks,
            recomputes=recomputes,
        )
        self.tracing = scheduler_tracing(vllm_config, config, local)
        self.leases.observer = self.loads.observer = self.tracing
        allowed = allowed_hosts_of(config.allowed_hosts, secrets, local.host)
        trusted = TrustedHosts(allowed, has_list=config.allowed_hosts is not None)
        spans = local.block_spans if config.streaming == "auto" else ()
        loop = EngineLoop()
        asking = PromptQueries(loop, recomputes=recomputes, spans=spans)
        directory = PromptDirectory(sibling_ports(vllm_config))
        self._intake = RequestIntake(
            local, self.leases, self.loads, counters, trusted, self.tracing, asking, directory
        )
        builder = ParamsBuilder(local, kv_cache_config, copies_blocks=uses_host_buffer(vllm_config))
        streams = can_stream(vllm_config, kv_cache_config, config)
        depth = vllm_config.max_concurrent_batches
        self._offers = TicketBuilder(
            local,
            self.leases,
            self.blocks,
            builder,
            directory,
            counters,
            max_steps=depth,
            streams=streams,
        )
        drain = Drain(self.leases, float(vllm_config.shutdown_timeout))
        load_listener: LoadListener | None = None
        if local.reads:
            load_listener = LoadListener(local.boot, workers, loop.wake, depth)
        self.steps = Steps(
            self.leases,
            self.loads,
            asking,
            workers,
            drain=drain,
            loop=loop,
            load_listener=load_listener,
            may_wait=has_no_dp_siblings(vllm_config),
        )
        self.eviction = LeaseEviction(
            vllm_config, local, self.leases, self.steps, self.blocks, config.max_leased_fraction
        )
        self._admission = Admission(self.eviction.requests, self.blocks, self.loads.quarantine)
        # Another child of a MultiConnector may hold the blocks of a request that is aborted while it is loaded. vLLM
        # frees them at the first of two reports, the load's end and that child's, and ends the engine at the second.
        # So this connector holds them too, and reports the end as that child does: MultiConnector waits for both.
        self._children_hold = False
        self._stalls = StallWatch(
            self.eviction.requests, self.blocks, self.leases, self.loads, self.steps, counters
        )
        self.monitor = EngineMonitor(
            self.leases,
            self.loads,
            self.blocks,
            self.eviction.requests.by_id,
            counters,
            always=config.debug_check_integrity,
        )
        facts = facts_of(vllm_config, config)
        try:
            self.channel = SideChannel(
                local,
                facts,
                config,
                secrets,
                allowed,
                self.leases,
                self.loads,
                counters,
                self.steps.poll,
                asking,
                directory,
                wake=self.steps.wake,
                load_listener=load_listener,
            )
        except BaseException:
            self.steps.close()
            self.tracing.close()
            raise

    # Hooks of a request.

    def on_new_request(self, request: Request) -> None:
        """Read the request's params before vLLM does."""
        self._intake.receive(request)
        self.eviction.requests.add(request)
        self.channel.flush()

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int | None:
        """Tokens beyond the local prefix hit that can be loaded; None makes vLLM ask again in the next step, if the
        request needs a lease and a slot may be free by then."""
        asking = self.channel.asking
        if request.request_id in asking.queries:
            self._take_answers()
            num_requests = len(self.eviction.requests.by_id)
            while request.request_id in asking.queries and self.steps.wait_for_answers(
                num_requests
            ):
                self._take_answers()
            if request.request_id in asking.queries:
                return None
        if request.request_id in asking.failing:
            return 1
        is_intended = self.leases.state(request.request_id) is LeaseState.INTENDED
        if is_intended and not self.leases.slots.free and self.steps.may_report_ended_leases:
            return None
        may_load = self._children_hold or self.loads.state(request.request_id) is LoadState.OFFERED
        if self._admission.must_wait(request, may_load=may_load):
            return None
        matched = self.loads.matched_tokens(request.request_id, num_local_tokens)
        if matched and self._admission.loads_nothing(request):
            self.loads.compute_here(request.request_id, "blocks_pinned")
            self.channel.flush()
            return 0
        return matched

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for the request."""
        self.eviction.requests.admitted(request)
        self._admission.admitted(request.request_id)
        is_intended = self.leases.state(request.request_id) is LeaseState.INTENDED
        if is_intended and not self.leases.open(request.request_id):
            slots = self.leases.slots.count
            logger.warning(
                "req=%s is served without a lease: all %d slots are used", request.request_id, slots
            )
        self._offers.opened(request)
        self._intake.allocated(request)
        self.channel.asking.allocated(request.request_id, num_external_tokens)
        prompt = self.loads.get(request.request_id)
        if prompt is not None:
            was_offered = prompt.state is LoadState.OFFERED
            local: tuple[Sequence[int], ...] = ()
            if num_external_tokens:
                local = self._offers.builder.load_blocks(
                    blocks.get_block_ids(), prompt.shared_tokens
                )
            self.loads.allocated(request.request_id, num_external_tokens, local)
            if was_offered and prompt.state is LoadState.LOADING:
                self.monitor.counters.sample("order_wait_s", time.monotonic() - prompt.offered_s)
            self.channel.flush()

    def finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended.

        Returns:
            Whether vLLM must hold its blocks, and the params of its response. vLLM could hold a lease's blocks, but
            then the request stays in its scheduler, and the engine steps every millisecond, on more than one core, as
            long as they are held. So the lease has a reference of its own on each block. An aborted load's blocks are
            held by vLLM itself, except under a MultiConnector (`_children_hold`).
        """
        by_error = has_ended_by_error(request)
        is_held = self.loads.finished(request.request_id, by_error=by_error) and self._children_hold
        self.channel.asking.finished(request.request_id)
        self.eviction.requests.remove(request.request_id)
        self._admission.admitted(request.request_id)
        self.tracing.finished(request.request_id)
        self._intake.finished(request)
        self.channel.flush()
        lease = self.leases.running(request.request_id)
        if lease is not None and lease.use is LeaseUse.TURN and self.steps.drain.has_begun:
            self.leases.abandon(request.request_id)
        offer = self._offers.finished(request, block_ids)
        if offer is None:
            return is_held, None
        params, lease = offer
        logger.debug(
            "req=%s slot=%d holds %d tokens",
            request.request_id,
            lease.slot,
            params.remote_num_tokens,
        )
        self.tracing.params_given(request.request_id, params, lease)
        is_turn = lease.use is LeaseUse.TURN
        return False, params.to_json(
            is_turn=is_turn, at_once=self.channel.announces and not is_turn
        )

    # Hooks of a step.

    def build_metadata(
        self, num_tokens: Mapping[str, int], preempted: Collection[str] = (), *, loads: bool = False
    ) -> FerryMetadata:
        """All changes since the last step, for the workers.

        Args:
            num_tokens: scheduled in this step, by request.
            preempted: requests whose blocks were freed since the last step, and may be other requests' in this one.
            loads: whether another connector loads within this step.
        """
        self._offers.scheduled(num_tokens, preempted, loads=loads)
        self._take_answers()
        self.channel.receive()  # before eviction: after idling, messages that claim leases are still in the inbox
        wants_report = self.steps.begin()
        self.eviction.evict()
        may_expire = (
            not self.steps.is_waking
        )  # otherwise leases that were read while idle would count as expired
        boot, now_s = self.channel.local.boot, time.monotonic()
        fails = self.channel.asking.take_failing()
        orders = next_orders(self.leases, self.loads, boot, now_s, fails, may_expire=may_expire)
        self._admission.look_again()
        self._stalls.step(bool(num_tokens), self.channel.asking.queries)
        self.monitor.poll()
        metadata = _NOTHING
        if orders:
            self.tracing.progressed(orders.progress)
            self.tracing.ordered(orders.loads)
            metadata = FerryMetadata(
                encode_head(orders), encode_orders(orders)
            )  # once for all workers
        is_idle = not num_tokens and self.steps.may_wait
        if is_idle and not orders and not wants_report:
            self.steps.wait_for_loads(len(self.eviction.requests.by_id))
        return (
            FerryMetadata(metadata.head, metadata.frame, wants_report, is_idle)
            if wants_report or is_idle
            else metadata
        )

    def update(self, output: KVConnectorOutput) -> None:
        """Process the workers' reports. vLLM calls this before it frees any blocks of the step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, FerryWorkerMetadata):
            self.loads.quarantine.update(report.alive, time.monotonic())
            self.monitor.update(report.gauges)
            self.tracing.loads_reported(report.loads)
            for worker, over in report.over.items():
                for request_id in self.leases.acknowledge(worker, over):
                    logger.debug("req=%s: its blocks are free", request_id)
            self.steps.reported(report.over)
        if output.invalid_block_ids:
            self._offers.taken_back(output.invalid_block_ids, self.eviction.requests.by_id)
        failed = output.failed_recving or set()
        for request_id in failed:
            self._admission.failed(request_id)
        for request_id in tuple(output.finished_recving or ()):
            if self.loads.state(request_id) not in IN_FLIGHT:
                continue  # another child of a MultiConnector has loaded it
            if self._children_hold and self.loads.state(request_id) is LoadState.ABORTED:
                output.finished_recving.discard(request_id)
            self.tracing.reported(request_id, good=request_id not in failed)
            if request_id in failed:
                prompt = self.loads.failed(request_id)
                if prompt is not None and prompt.state is LoadState.FAILED:
                    # vLLM would do this when it looks at the request, which may stand behind one that lacks the blocks.
                    self.blocks.free(self.eviction.requests.by_id[request_id])
                continue
            prompt = self.loads.loaded(request_id)
            if prompt is not None:
                self.monitor.counters.sample("handover_s", time.monotonic() - prompt.offered_s)
        self._admission.look_again()
        self.channel.flush()
        self.monitor.poll()

    # Other hooks.

    def must_step(self) -> bool:
        """Whether the engine must step although it has no request. If not, it is idle, even with held leases.

        Answers need no step: an idle engine gives the tickets of requests that have ended back at once.
        """
        self._local.weights.watch()
        self._take_answers()
        return self.steps.must_step(has_producers=self.channel.poll())

    def described(self, handshakes: Collection[KVConnectorHandshakeMetadata]) -> None:
        """The workers have described themselves. Raises as `SideChannel.publish`."""
        self.channel.publish(handshakes)
        self._children_hold = any(getattr(handshake, "is_child", False) for handshake in handshakes)

    def reset(self) -> bool:
        """The weights have changed or are about to: caches of the old weights must not be used with the new ones.

        Every held lease ends, through the fence. A running request keeps its computed tokens, so it offers nothing at
        its end; one without computed tokens, or a preempted one, gets a lease with a new epoch when it begins. Prompts
        whose load has not begun are computed here, since their producer's blocks are of the old weights.

        Returns:
            Whether the reset is complete. While loads are in flight it is not, and vLLM must call again.
        """
        self.leases.release_all("reset")
        self._offers.reset()
        self._local.adapters.reset()
        for lease in self.leases.leases(LeaseState.INTENDED, LeaseState.COMPUTING):
            self.leases.abandon(lease.request_id, "reset")
            if not self.eviction.requests.by_id[lease.request_id].num_computed_tokens:
                self.leases.intend(lease.request_id, lease.use)
        self.loads.decline_offered("reset")
        self.channel.flush()
        return not self.loads.requests(*IN_FLIGHT)

    def close(self) -> None:
        """Release the leases of other engines, and stop the threads. Idempotent."""
        self.loads.give_all_back()
        self.channel.close()
        self.steps.close()
        self.tracing.close()

    # Helpers.

    def _take_answers(self) -> None:
        """Apply the answers to questions: their requests load with the ticket, or are computed here."""
        for settled in self.channel.asking.take():
            self._intake.answered(settled, self.eviction.requests.by_id.get(settled.request_id))
        self.channel.flush()
