"""The connector in the scheduler's process: vLLM's hooks carried to the two ledgers and the side channel."""

from __future__ import annotations

import ipaddress
import logging
import queue
import time
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.request import RequestStatus

from kvferry.connector.config import FerryConfig
from kvferry.connector.description_file import write_description
from kvferry.connector.facts import facts_of, topology_of, uses_host_buffer
from kvferry.connector.layout import groups_of
from kvferry.connector.messages import FerryHandshake, FerryMetadata, FerryWorkerMetadata
from kvferry.connector.metrics import FerryStats
from kvferry.connector.prompts import prompt_of
from kvferry.connector.quarantine import Quarantine
from kvferry.plan.windows import held_from, reaches_back
from kvferry.protocol.digests import digest_chain, shared_tokens
from kvferry.protocol.errors import ForeignParams, InvalidParams
from kvferry.protocol.handshake import EngineDescription, Release, Renew, decode_worker
from kvferry.protocol.ids import epoch_to_text, new_boot_id
from kvferry.protocol.orders import StepOrders, encode_orders
from kvferry.protocol.params import PARAMS_VERSION, RemoteDecode, RemotePrefill, Ticket, read_params
from kvferry.protocol.seal import new_seal_key, seal
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.listener import SideChannelListener
from kvferry.scheduler.producer.ledger import Lease, ProducerLedger
from kvferry.scheduler.renewer import LeaseRenewer
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
_UNSEALED = "0" * 64
_ENDED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """One engine's scheduler half.

    Raises:
        InvalidConfig: the side channel's address is taken, or a cache cannot be described.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._engine_id: str = transfer.engine_id
        self._is_producer: bool = transfer.is_kv_producer
        self._is_consumer: bool = transfer.is_kv_consumer
        self._recomputes: bool = transfer.kv_load_failure_policy == "recompute"
        self._boot = new_boot_id()
        self._seal_key = new_seal_key()
        self._facts = facts_of(vllm_config, config)
        self._topology = topology_of(vllm_config)
        self._groups = groups_of(kv_cache_config)
        self._copies_blocks = uses_host_buffer(vllm_config)
        self._all_or_nothing = any(group.policy != "full" for group in self._groups)
        self._host = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        self._port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
        self.tally = Tally()
        slots = lease_slots(config, vllm_config)
        self.leases = ProducerLedger(slots, config.kv_lease_duration, self.tally)
        self.loads = ConsumerLedger(self.tally)
        self._prefills: set[str] = set()
        self._samples: dict[str, list[float]] = {}
        self._quarantine = Quarantine()
        self._renewer = LeaseRenewer(self.tally) if self._is_consumer else None
        self._listener = self._listen()

    # What vLLM calls when requests come and go.

    def on_new_request(self, request: Request) -> None:
        """Understand the request's params before vLLM looks at them; what cannot be used is taken away."""
        try:
            params = read_params(request.kv_transfer_params)
            if isinstance(params, RemoteDecode):
                self._accept_prefill(request)
            elif params is not None:
                self._accept_remote_prompt(request, params)
        except ForeignParams as foreign:
            self._compute_here(request, "foreign_params", str(foreign))
        except InvalidParams as invalid:
            self._compute_here(request, "invalid_params", str(invalid))
        except Exception as error:
            # An exception here would end the engine's input loop. The request is served without a transfer.
            logger.exception("req=%s: an unforeseen error in its params", request.request_id)
            self._compute_here(request, "invalid_params", repr(error))
        self._say()

    def matched_tokens(self, request: Request, num_local_tokens: int) -> int:
        """Tokens beyond the local prefix hit that can be loaded."""
        return self.loads.matched_tokens(request.request_id, num_local_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM has given the request blocks."""
        if request.request_id in self._prefills and not self.leases.open(request.request_id):
            logger.warning("req=%s is served without a lease: all %d are taken", request.request_id, self.leases.slots)
            self._prefills.discard(request.request_id)
        if self.loads.state(request.request_id) is not None:
            local = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
            self.loads.allocated(request.request_id, num_external_tokens, local)
            self._say()

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended.

        Returns:
            Whether its blocks are held, and what its answer carries.
        """
        self.loads.finished(request.request_id)
        self._say()
        if request.request_id not in self._prefills:
            return False, None
        self._prefills.discard(request.request_id)
        prompt = prompt_of(request)
        num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, len(request.all_token_ids) - 1)
        held = self._transferable(block_ids, max(0, num_tokens))
        if request.status not in _ENDED_WELL or prompt is None or not any(held):
            self.leases.abandon(request.request_id)
            return False, None
        lease = self.leases.finish(request.request_id, held if self._copies_blocks else ())
        if lease is None:
            return False, None
        params = self._params(request, lease, held, num_tokens, digest_chain(prompt, num_tokens))
        logger.debug("req=%s slot=%d holds %d tokens", request.request_id, lease.slot, num_tokens)
        return True, params.to_json()

    # What vLLM calls once a step.

    def build_metadata(self) -> FerryMetadata:
        """Everything that changed since the last step, for the workers."""
        self._hear()
        leases = self.leases.take_orders(time.monotonic())
        orders = StepOrders(
            boot=self._boot,
            ends=leases.ends,
            opens=leases.opens,
            holds=leases.holds,
            loads=self.loads.take_orders(),
        )
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

    def publish(self, workers: Mapping[tuple[int, int], object]) -> None:
        """The workers have described themselves: answer handshakes from now on.

        Raises:
            InvalidConfig: the description was to be written to a file, and cannot be.
        """
        described = [
            decode_worker(worker.frame) for _, worker in sorted(workers.items()) if isinstance(worker, FerryHandshake)
        ]
        if not described:
            return
        engine = EngineDescription(
            engine_id=self._engine_id,
            boot=self._boot,
            seal_key=self._seal_key,
            facts=self._facts,
            topology=self._topology,
            groups=self._groups,
            workers=tuple(described),
        )
        if self._listener is not None:
            self._listener.publish(engine)
        if self._config.description_file is not None:
            logger.info("described this engine in %s", write_description(self._config.description_file, engine))

    def has_pinned_blocks(self) -> bool:
        """Whether the engine must keep stepping so that blocks in quarantine come back."""
        return len(self._quarantine) > 0

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
        if not self._is_producer:
            return None
        if not _is_loopback(self._host):
            logger.warning(
                "the side channel on %s:%d answers anybody who can reach it; keep it on a trusted network",
                self._host,
                self._port,
            )
        return SideChannelListener(self._host, self._port, self.tally)

    def _accept_prefill(self, request: Request) -> None:
        if not self._is_producer:
            self._compute_here(request, "wrong_role", "this engine is no producer (kv_role)")
        elif not request.resumable and prompt_of(request) is not None:
            self._prefills.add(request.request_id)
            logger.debug("req=%s is to be decoded elsewhere", request.request_id)

    def _accept_remote_prompt(self, request: Request, source: RemotePrefill) -> None:
        prompt = prompt_of(request)
        if not self._is_consumer:
            self._compute_here(request, "wrong_role", "this engine is no consumer (kv_role)")
        elif source.remote_engine_id == self._engine_id:
            self._compute_here(request, "own_engine", "the params name this very engine")
        elif prompt is None:
            self._compute_here(request, "prompt_embeds", "a prompt of embeddings has no tokens to compare")
        elif request.abort_immediately:
            # The front end rejected this request; it is here only so that the remote blocks are given back.
            self.loads.decline(source)
            request.kv_transfer_params = None
        else:
            self._offer(request, source, shared_tokens(prompt, source.kvferry.digests, source.remote_num_tokens))

    def _offer(self, request: Request, source: RemotePrefill, shared: int) -> None:
        if self._all_or_nothing and shared < source.remote_num_tokens:
            shared = 0
        elif not self._windows_reach(source, request.num_prompt_tokens):
            self._compute_here(request, "window_edge", "its last token needs a block that the producer has given back")
            return
        refused = self.loads.offer(request.request_id, source, min(shared, request.num_prompt_tokens), time.monotonic())
        if refused is not None:
            self._compute_here(request, refused, f"{source.remote_num_tokens} tokens of req={source.remote_request_id}")
            return
        logger.debug(
            "req=%s: %d of %d tokens are held by engine %s as req=%s slot=%d",
            request.request_id,
            shared,
            request.num_prompt_tokens,
            source.remote_engine_id,
            source.remote_request_id,
            source.kvferry.lease_slot,
        )

    def _windows_reach(self, source: RemotePrefill, prompt_tokens: int) -> bool:
        num_tokens, told = source.remote_num_tokens, source.kvferry.held_from
        if len(told) != len(self._groups):
            sides = zip(self._groups, source.remote_block_ids, strict=False)
            told = tuple(held_from(group, len(ids), num_tokens) for group, ids in sides)
        return all(
            reaches_back(group, first, num_tokens, prompt_tokens)
            for group, first in zip(self._groups, told, strict=False)
        )

    def _compute_here(self, request: Request, reason: str, detail: str) -> None:
        self.tally.add("local_recomputes", reason)
        request.kv_transfer_params = None
        logger.warning("req=%s is computed here (%s): %s", request.request_id, reason, detail)

    def _transferable(self, block_ids: tuple[list[int], ...], num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of the first `num_tokens` tokens, without the null blocks of those that left their window.

        vLLM may have one block more than that: a step that was in flight when the request stopped had its token too.
        """
        chosen = self._kv_cache_config.select_transfer_block_ids(block_ids)
        clipped = [ids[: -(-num_tokens // group.block_tokens)] for ids, group in zip(chosen, self._groups, strict=True)]
        return tuple(tuple(ids[_leading_nulls(ids) :]) for ids in clipped)

    def _params(
        self,
        request: Request,
        lease: Lease,
        held: tuple[tuple[int, ...], ...],
        num_tokens: int,
        digests: tuple[str, ...],
    ) -> RemotePrefill:
        ticket = Ticket(
            version=PARAMS_VERSION,
            boot=self._boot,
            lease_slot=lease.slot,
            lease_epoch=epoch_to_text(lease.epoch),
            lease_s=self.leases.lease_s,
            digests=digests,
            mac=_UNSEALED,
            held_from=tuple(
                held_from(group, len(ids), num_tokens) for group, ids in zip(self._groups, held, strict=True)
            ),
        )
        unsealed = RemotePrefill(
            remote_engine_id=self._engine_id,
            remote_request_id=request.request_id,
            remote_block_ids=held,
            remote_host=self._host,
            remote_port=self._port,
            tp_size=self._topology.tp,
            pp_size=self._topology.pp,
            dcp_size=self._topology.dcp,
            remote_num_tokens=num_tokens,
            kvferry=ticket,
        )
        return seal(unsealed, self._seal_key)

    def _hear(self) -> None:
        """Bring in what the side channel received."""
        if self._listener is None:
            return
        while True:
            try:
                message = self._listener.inbox.get_nowait()
            except queue.Empty:
                return
            if message.boot != self._boot:
                self.tally.add("renewals_unknown" if isinstance(message, Renew) else "releases_unknown")
                continue
            for name in message.leases:
                if isinstance(message, Release):
                    self.leases.release(name)
                else:
                    self.leases.renew(name)

    def _say(self) -> None:
        """Hand the ledger's commands to the thread that sends them."""
        if self._renewer is not None:
            self._renewer.submit(self.loads.take_commands())


def lease_slots(config: FerryConfig, vllm_config: VllmConfig) -> int:
    """Slots of the lease table; scheduler and workers of one engine must agree, so both ask here."""
    return config.lease_slots or max(1024, 4 * vllm_config.scheduler_config.max_num_seqs)


def _leading_nulls(ids: list[int]) -> int:
    return next((index for index, block in enumerate(ids) if block), len(ids))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
