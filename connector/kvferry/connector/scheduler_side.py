"""The connector in the scheduler's process: vLLM's hooks carried to the two ledgers and the side channel."""

from __future__ import annotations

import ipaddress
import logging
import time
from typing import TYPE_CHECKING, Any

from kvferry.connector.config import FerryConfig
from kvferry.connector.description_file import write_description
from kvferry.connector.facts import facts_of, uses_host_buffer
from kvferry.connector.messages import FerryMetadata, FerryWorkerMetadata, workers_of
from kvferry.connector.metrics import FerryStats
from kvferry.connector.offering import Offering
from kvferry.connector.own_engine import OwnEngine
from kvferry.connector.quarantine import Quarantine
from kvferry.connector.reception import Reception
from kvferry.connector.room import Room
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.orders import encode_orders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.listener import SideChannelListener
from kvferry.scheduler.producer.ledger import LeaseUse, ProducerLedger
from kvferry.scheduler.renewer import LeaseRenewer
from kvferry.scheduler.step import hear, next_orders
from kvferry.scheduler.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NOTHING = FerryMetadata()


class SchedulerSide:
    """One engine's scheduler half.

    Raises:
        InvalidConfig: the side channel's address is taken, or a cache cannot be described.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig) -> None:
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._recomputes: bool = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self._copies_blocks = uses_host_buffer(vllm_config)
        self._facts = facts_of(vllm_config, config)
        self._own = OwnEngine.of(vllm_config, kv_cache_config, config)
        self.tally = Tally()
        self.leases = ProducerLedger(
            lease_slots(config, vllm_config),
            config.kv_lease_duration,
            self.tally,
            turn_s=config.decoder_kv_blocks_ttl,
        )
        self.loads = ConsumerLedger(self.tally, config.kv_recompute_threshold)
        self._reception = Reception(self._own, self.leases, self.loads, self.tally)
        self._offering = Offering(self._own, kv_cache_config)
        self._samples: dict[str, list[float]] = {}
        self._quarantine = Quarantine()
        self._room = Room(self._own, self.leases)
        self._renewer = LeaseRenewer(self.tally) if self._own.is_consumer else None
        self._listener = self._listen()

    # What vLLM calls when requests come and go.

    def on_new_request(self, request: Request) -> None:
        """Understand the request's params before vLLM looks at them."""
        self._reception.receive(request)
        self._room.arrived(request)
        self._say()

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        """Tokens beyond the local prefix hit that can be loaded."""
        return self.loads.matched_tokens(request.request_id, num_local_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has given the request blocks."""
        use = self._reception.wanted.get(request.request_id)
        if use is not None and not self.leases.open(request.request_id, use):
            logger.warning("req=%s is served without a lease: all %d are taken", request.request_id, self.leases.slots)
            del self._reception.wanted[request.request_id]
        if self.loads.state(request.request_id) is not None:
            chosen = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
            local = self._own.without_scratch(chosen, self.loads.shared_tokens(request.request_id))
            self.loads.allocated(request.request_id, num_external_tokens, local)
            self._say()

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended.

        Returns:
            Whether its blocks are held, and what its answer carries.
        """
        self.loads.finished(request.request_id)
        self._room.finished(request.request_id)
        self._say()
        use = self._reception.wanted.pop(request.request_id, None)
        if use is None:
            return False, None
        held = self._offering.held(request, block_ids, use)
        if held is None:
            self.leases.abandon(request.request_id)
            return False, None
        lease = self.leases.finish(request.request_id, held.blocks if self._copies_blocks else ())
        if lease is None:
            return False, None
        logger.debug("req=%s slot=%d holds %d tokens", request.request_id, lease.slot, held.num_tokens)
        params = self._offering.params(held, lease, self.leases.lease_s)
        return True, params.to_json(is_turn=use is LeaseUse.TURN)

    # What vLLM calls once a step.

    def build_metadata(self) -> FerryMetadata:
        """Everything that changed since the last step, for the workers."""
        if self._listener is not None:
            # Before room is made: an engine that was idle has not heard yet which turns are claimed.
            hear(self._listener, self.leases, self._own.boot, self.tally)
        self._room.make()
        orders = next_orders(self._listener, self.leases, self.loads, self._own.boot, self.tally, time.monotonic())
        return FerryMetadata(encode_orders(orders)) if orders else _NOTHING

    def update(self, output: KVConnectorOutput) -> None:
        """What the workers report; vLLM frees nothing of this step before it."""
        told = output.kv_connector_worker_meta
        if isinstance(told, FerryWorkerMetadata):
            self._quarantine.update(told.alive)
        failed = output.failed_recving or set()
        for request_id in output.finished_recving or ():
            if request_id in failed:
                self.loads.failed(request_id)
                if self._recomputes:
                    self.tally.add("local_recomputes", "load_failed")
                else:
                    self.tally.add("failed_requests")
                continue
            prompt = self.loads.loaded(request_id)
            if prompt is not None:
                self._samples.setdefault("handover_s", []).append(time.monotonic() - prompt.offered_s)
        for request_id in output.finished_sending or ():
            self.leases.sent(request_id)
            self._room.freed(request_id)
            logger.debug("req=%s: its blocks are free", request_id)
        self._say()

    def take_stats(self) -> FerryStats | None:
        """Counters since the last call."""
        samples, self._samples = self._samples, {}
        return FerryStats.of_counts(self.tally.take(), samples)

    # What vLLM calls once, or rarely.

    def bind(self, manager: KVCacheManager) -> None:
        """The engine's block pool, for blocks that must not be reused yet."""
        self._quarantine.bind(manager)
        self._room.bind(manager)

    def publish(self, workers: Mapping[tuple[int, int], object]) -> None:
        """The workers have described themselves: answer handshakes from now on.

        Raises:
            InvalidConfig: the description was to be written to a file, and cannot be.
        """
        described = workers_of(workers.values())
        if not described:
            return
        engine = EngineDescription(
            engine_id=self._own.engine_id,
            boot=self._own.boot,
            seal_key=self._own.seal_key,
            facts=self._facts,
            topology=self._own.topology,
            groups=self._own.groups,
            workers=described,
        )
        if self._listener is not None:
            self._listener.publish(engine)
        if self._config.description_file is not None:
            logger.info("described this engine in %s", write_description(self._config.description_file, engine))

    def has_pinned_blocks(self) -> bool:
        """Whether the engine must keep stepping so that blocks in quarantine come back."""
        return len(self._quarantine) > 0

    def has_coming_blocks(self) -> bool:
        """Whether a running request need not be preempted, since blocks are coming in a step or two."""
        return self._room.is_coming

    def reset(self) -> bool:
        """The caches are about to be invalid: nobody may read under a lease that is open now."""
        self.leases.release_all("reset")
        return True

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        if self._renewer is not None:
            self._renewer.close()

    # How it does it.

    def _listen(self) -> SideChannelListener | None:
        if not self._own.is_producer:
            return None
        if not _is_loopback(self._own.host):
            logger.warning(
                "the side channel on %s:%d answers anybody who can reach it; keep it on a trusted network",
                self._own.host,
                self._own.port,
            )
        return SideChannelListener(self._own.host, self._own.port, self.tally)

    def _say(self) -> None:
        """Hand the ledger's commands to the thread that sends them."""
        if self._renewer is not None:
            self._renewer.submit(self.loads.take_commands())


def lease_slots(config: FerryConfig, vllm_config: VllmConfig) -> int:
    """Slots of the lease table; scheduler and workers of one engine must agree, so both ask here."""
    return config.lease_slots or max(1024, 4 * vllm_config.scheduler_config.max_num_seqs)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
