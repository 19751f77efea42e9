"""The connector in the scheduler's process: connects vLLM's hooks to the two ledgers and the side channel."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kvferry.connector.allowed_hosts import AllowedHosts
from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.facts import facts_of, is_alone, lease_slots, num_workers, uses_host_buffer
from kvferry.connector.engine.local_engine import LocalEngine, write_description
from kvferry.connector.messages import FerryMetadata, FerryWorkerMetadata, workers_of
from kvferry.connector.metrics.stats import FerryStats
from kvferry.connector.scheduler_side.drain import Drain, DrainSignal
from kvferry.connector.scheduler_side.gauges import EngineGauges
from kvferry.connector.scheduler_side.held_blocks import HeldBlocks, QuarantinedBlocks, ids_to_hold
from kvferry.connector.scheduler_side.idle import IdleState
from kvferry.connector.scheduler_side.intake import RequestIntake
from kvferry.connector.scheduler_side.integrity import Integrity
from kvferry.connector.scheduler_side.lease_eviction import LeaseEviction
from kvferry.connector.scheduler_side.listen import listen
from kvferry.connector.scheduler_side.params_builder import ParamsBuilder
from kvferry.connector.scheduler_side.prewarm import KnownProducers
from kvferry.connector.tracing.start import scheduler_tracing
from kvferry.connector.vllm_internals import EngineBlocks
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.side_channel.secrets import secrets_from_environment
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.consumer.remote_prompt import LoadState
from kvferry.scheduler.producer.lease import LeaseState, LeaseUse, WorkerAcks
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.state.counters import Counters
from kvferry.scheduler.step import next_orders, receive_messages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NOTHING = FerryMetadata()
_UNDER_WAY = (LoadState.LOADING, LoadState.ABORTED)
_HELD = (LeaseState.HELD, LeaseState.ENDING)


class SchedulerSide:
    """The scheduler side of one engine.

    Raises:
        InvalidConfig: the side channel's address is in use, its secrets are invalid, or a cache cannot be described.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig) -> None:
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._secrets = secrets_from_environment()
        self._recomputes: bool = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self._copies_blocks = uses_host_buffer(vllm_config)
        self._facts = facts_of(vllm_config, config)
        self._local = LocalEngine.of(vllm_config, kv_cache_config, config)
        self.counters = Counters()
        self.leases = ProducerLedger(
            lease_slots(config, vllm_config),
            config.kv_lease_duration,
            self.counters,
            turn_s=config.decoder_kv_blocks_ttl,
        )
        self.loads = ConsumerLedger(self.counters, config.kv_recompute_threshold)
        allowed = AllowedHosts.of(config.allowed_hosts) if config.allowed_hosts is not None else None
        self.tracing = scheduler_tracing(vllm_config, config, self._local)
        self.leases.observer = self.loads.observer = self.tracing
        self._intake = RequestIntake(self._local, self.leases, self.loads, self.counters, allowed, self.tracing)
        self._params_builder = ParamsBuilder(self._local, kv_cache_config)
        self._blocks = EngineBlocks()
        self._gauges = EngineGauges(self.leases, self.loads, self._blocks)
        self._quarantined_blocks = QuarantinedBlocks(self._blocks)
        self._held = HeldBlocks(self._blocks)
        self._acks = WorkerAcks(num_workers(self._local.topology))
        self._idle = IdleState(self.leases, self._quarantined_blocks, self._acks.workers)
        self._eviction = LeaseEviction(
            vllm_config, self._local, self.leases, self._idle, self._blocks, config.max_leased_fraction
        )
        self._integrity = Integrity(
            self.leases,
            self.loads,
            self._intake,
            self._eviction,
            self._quarantined_blocks,
            self._held,
            self.counters,
            always=config.debug_check_integrity,
        )
        self._is_alone = is_alone(vllm_config)
        self._drain_signal = DrainSignal()
        self._drain = Drain(self._drain_signal, self.leases, float(vllm_config.shutdown_timeout))
        self._renewer = LeaseRenewer(self.counters, self._secrets) if self._local.reads else None
        self._listener = listen(self._local, self.counters, self._secrets, self.leases, self._idle.poll)
        self._known = KnownProducers(
            config.prewarm_peers, self._local.engine_id, config.handshake_timeout_s, self._secrets
        )

    # Hooks of a request.

    def on_new_request(self, request: Request) -> None:
        """Read the request's params before vLLM does."""
        self._intake.receive(request)
        self._eviction.arrived(request)
        self._flush()

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int | None:
        """Tokens beyond the local prefix hit that can be loaded; None makes vLLM ask again in the next step, if the
        request needs a lease and a slot may be free by then."""
        if request.request_id in self._intake.lease_intents and not self.leases.free_slots and self._idle.has_news:
            return None
        return self.loads.matched_tokens(request.request_id, num_local_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for the request."""
        self._eviction.admitted(request)
        use = self._intake.lease_intents.get(request.request_id)
        if use is not None and not self.leases.open(request.request_id, use):
            slots = self.leases.slots
            logger.warning(
                "req=%s is served without a lease: all %d slots are used, or one by its id", request.request_id, slots
            )
            del self._intake.lease_intents[request.request_id]
        self._intake.allocated(request.request_id)
        if self.loads.state(request.request_id) is not None:
            local = self._local_blocks(request, blocks) if num_external_tokens else ()
            waits_since_s = self.loads.waits_since_s(request.request_id)
            self.loads.allocated(request.request_id, num_external_tokens, local)
            if waits_since_s is not None and self.loads.state(request.request_id) is LoadState.LOADING:
                self.counters.sample("order_wait_s", time.monotonic() - waits_since_s)
            self._flush()

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended.

        Returns:
            Whether vLLM must hold its blocks, which is always False (see `HeldBlocks`), and the params of its response.
        """
        self.loads.finished(request.request_id)
        self._eviction.finished(request.request_id)
        self.tracing.finished(request.request_id)
        self._flush()
        use = self._intake.ended(request.request_id)
        if use is None or self.leases.state(request.request_id) is not LeaseState.COMPUTING:
            return False, None  # a held lease belongs to an earlier request with the same id
        held = self._params_builder.held(request, block_ids, use)
        if held is None or (self._drain.has_begun and use is LeaseUse.TURN) or not self._blocks.is_bound:
            self.leases.abandon(request.request_id)
            return False, None
        held_ids = ids_to_hold(block_ids)
        lease = self.leases.finish(request.request_id, held.blocks if self._copies_blocks else (), held_ids)
        if lease is None:
            return False, None
        self._held.hold(request.request_id, held_ids)
        self.tracing.params_given(lease, held.num_tokens)
        logger.debug("req=%s slot=%d holds %d tokens", request.request_id, lease.slot, held.num_tokens)
        params = self._params_builder.build(held, lease, self.leases.lease_s)
        return False, params.to_json(is_turn=use is LeaseUse.TURN)

    # Hooks of a step.

    def build_metadata(self, *, is_idle: bool) -> FerryMetadata:
        """All changes since the last step, for the workers.

        Args:
            is_idle: whether no token is scheduled in this step.
        """
        if self._listener is not None:
            # Before eviction: after idling, messages that claim leases are still in the inbox.
            receive_messages(self._listener, self.leases, self._local.boot, self.counters)
        asks = self._idle.begin_step()
        self._drain.step()
        self._eviction.evict()
        if self._known.poll():
            for producer in self._known.take():
                self.loads.prewarm_static(producer, time.monotonic())
        may_expire = not self._idle.is_waking  # otherwise leases that were read while idle would count as expired
        orders = next_orders(self.leases, self.loads, self._local.boot, time.monotonic(), may_expire=may_expire)
        self._integrity.poll()
        metadata = _NOTHING
        if orders:
            self.tracing.ordered(orders.loads)
            metadata = FerryMetadata.of(orders)
        is_idle = is_idle and self._is_alone
        return FerryMetadata(metadata.head, metadata.frame, asks, is_idle) if asks or is_idle else metadata

    def update(self, output: KVConnectorOutput) -> None:
        """Process the workers' reports. vLLM calls this before it frees any blocks of the step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, FerryWorkerMetadata):
            self._quarantined_blocks.update(report.alive)
            self._gauges.update(report.gauges)
            self.tracing.loads_reported(report.loads)
            self._free(report)
        failed = output.failed_recving or set()
        for request_id in output.finished_recving or ():
            if self.loads.state(request_id) not in _UNDER_WAY:
                continue  # another child of a MultiConnector has loaded it
            self.tracing.reported(request_id, good=request_id not in failed)
            if request_id in failed:
                lost = self.loads.failed(request_id)
                if lost is not None and self._recomputes:
                    self.counters.add("local_recomputes", "load_failed")
                    self.tracing.recomputed(lost, "load_failed")
                else:
                    self.counters.add("failed_requests")
                continue
            prompt = self.loads.loaded(request_id)
            if prompt is not None:
                self.counters.sample("handover_s", time.monotonic() - prompt.offered_s)
        self._flush()
        self._integrity.poll()

    def take_stats(self) -> FerryStats | None:
        """Counters and samples since the last call, and gauges that have changed."""
        gauges = {**self._quarantined_blocks.gauges(time.monotonic()), **self._gauges.changes()}
        return FerryStats.of_counts(self.counters.take(), self.counters.take_samples(), gauges)

    # Other hooks.

    def bind(self, manager: KVCacheManager) -> None:
        """Take the KV cache manager, whose block pool is needed to hold blocks and to count free ones.

        Raises:
            UnsupportedVllm: blocks cannot be kept out of the pool.
        """
        self._blocks.bind(manager)
        self.leases.block_references.bind(self._blocks.reference_count)

    def publish(self, workers: Mapping[tuple[int, int], object]) -> None:
        """Take the workers' descriptions, and answer handshakes from now on.

        Raises:
            InvalidConfig: `description_file` cannot be written, or a description is not kvferry's.
        """
        described = workers_of(workers.values())
        if not described:
            return
        engine = EngineDescription(
            engine_id=self._local.engine_id,
            boot=self._local.boot,
            mac_key=self._local.mac_key,
            facts=self._facts,
            topology=self._local.topology,
            groups=self._local.groups,
            workers=described,
        )
        if self._listener is not None:
            self._listener.publish(engine)
        if self._config.description_file is not None:
            logger.info("wrote the engine's description: %s", write_description(self._config.description_file, engine))

    def must_step(self) -> bool:
        """Whether the engine must step although it has no request. If not, it is idle, even with held leases."""
        return self._known.poll() or self._idle.must_step(is_draining=self._drain.is_requested)

    def has_coming_blocks(self) -> bool:
        """Whether blocks will be freed within a step or two, so that no running request need be preempted."""
        return self._eviction.is_coming

    def reset(self) -> bool:
        """The weights have changed or are about to: caches of the old weights must not be used with the new ones.

        Every held lease ends, through the fence. A running request keeps its computed tokens, so it offers nothing at
        its end; one without computed tokens, or a preempted one, gets a lease with a new epoch when it begins. Prompts
        whose load has not begun are computed here, since their producer's blocks are of the old weights.

        Returns:
            Whether the reset is complete. While loads are in flight it is not, and vLLM must call again.
        """
        self.leases.release_all("reset")
        for request_id in self.leases.requests(LeaseState.COMPUTING):
            self.leases.abandon(request_id, "reset")
        for request_id in list(self._intake.lease_intents):
            if self._eviction.unfinished[request_id].num_computed_tokens:
                del self._intake.lease_intents[request_id]
        self.loads.decline_offered("reset")
        self._flush()
        return not self.loads.requests(*_UNDER_WAY)

    def check_integrity(self) -> None:
        """Check the integrity of the scheduler side.

        Raises:
            LocalProtocolError: with the counts that disagree.
        """
        self._integrity.check()

    def close(self) -> None:
        """Release the leases of other engines, and stop the threads. Idempotent."""
        self.loads.give_all_back()
        self._flush()
        self._known.close()
        if self._listener is not None:
            self._listener.close()
        if self._renewer is not None:
            self._renewer.close()
        self.tracing.close()

    # Helpers.

    def _local_blocks(self, request: Request, blocks: KVCacheBlocks) -> tuple[Sequence[int], ...]:
        """The blocks into which the request's tokens are loaded, per transferred cache group."""
        chosen = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
        return self._local.without_scratch(chosen, self.loads.shared_tokens(request.request_id))

    def _free(self, report: FerryWorkerMetadata) -> None:
        """Free the blocks of held leases that every worker reports as over; workers know only held ones."""
        for worker, reported in report.over.items():
            held = [request_id for request_id in reported if self.leases.state(request_id) in _HELD]
            for request_id in self._acks.take(worker, held):
                self.leases.sent(request_id)
                self._held.give_back(request_id)
                logger.debug("req=%s: its blocks are free", request_id)
        self._idle.reported(report.over)

    def _flush(self) -> None:
        """Pass the ledger's commands to the thread that sends them."""
        if self._renewer is not None and self.loads.has_commands:
            self._renewer.submit(self.loads.take_commands())
