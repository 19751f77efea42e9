"""The connector in a worker's process: vLLM's hooks carried to the worker."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.connector.cache_probe import arrangements_of
from kvferry.connector.config import FerryConfig
from kvferry.connector.facts import (
    facts_of,
    interleave_of,
    place_of_this_worker,
    sharding_of,
    topology_of,
    uses_host_buffer,
    worker_index,
)
from kvferry.connector.gather import engine_groups, gather_workers
from kvferry.connector.layout import discover, groups_of
from kvferry.connector.messages import FerryHandshake, FerryMetadata, FerryWorkerMetadata
from kvferry.connector.metrics import FerryStats
from kvferry.connector.scheduler_side import lease_slots
from kvferry.connector.states import groups_of_heads
from kvferry.worker.nixl_agent import AgentConfig
from kvferry.worker.nixl_fabric import NixlFabric
from kvferry.worker.results import StepResults
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class WorkerSide:
    """One worker's half; it comes to life with the caches."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._worker: FerryWorker | None = None
        self._index = 0
        self._handshake: FerryHandshake | None = None
        self._step = StepResults()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and register the caches, and learn of the engine's other workers; all of them must do it together.

        Raises:
            InvalidConfig: a cache cannot be described.
            SiblingFailed: another worker of this engine has failed.
            FabricError: NIXL cannot be used, or refuses the memory.
        """
        started_s = time.monotonic()
        groups = engine_groups()
        try:
            self._worker = self._make_worker(kv_caches)
        except Exception as error:
            gather_workers(error, groups)  # raises it, once the others know
            raise
        siblings = gather_workers(self._worker.description, groups)
        self._worker.meet_siblings(siblings)
        place = self._worker.description.place
        self._handshake = FerryHandshake.of(place, siblings)
        logger.info(
            "worker %s registered %d paged tensors in %.2f s",
            place,
            len(self._worker.description.tensors),
            time.monotonic() - started_s,
        )

    def describe(self) -> FerryHandshake | None:
        """This worker as peers need it, with its replicas; None before the caches exist."""
        return self._handshake

    def bind(self, metadata: FerryMetadata) -> None:
        """Start what the scheduler ordered; it runs beside the forward pass."""
        orders = metadata.orders()
        if orders is not None and self._worker is not None:
            self._worker.carry_out(orders)

    def take_results(self) -> KVConnectorTransferResults:
        """What was completed since the last step. The rest of the step's results waits for the calls that follow."""
        self._step = self._worker.take_results() if self._worker is not None else StepResults()
        failed = set(self._step.failed)
        return KVConnectorTransferResults(
            finished_sending=self._step.sent,
            finished_recving=self._step.loaded | failed,
            failed_recving=failed,
        )

    def take_stats(self) -> FerryStats | None:
        """Figures of the step whose results were taken last."""
        stats, self._step = FerryStats.of_results(self._step), StepResults(alive=self._step.alive)
        return stats

    def take_metadata(self) -> FerryWorkerMetadata | None:
        """Which blocks may still be written, when that has changed."""
        alive, self._step.alive = self._step.alive, None
        return FerryWorkerMetadata({self._index: alive}) if alive is not None else None

    def close(self) -> None:
        """Stop the thread and give the memory back. Idempotent."""
        if self._worker is not None:
            self._worker.close()

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> FerryWorker:
        vllm_config, config = self._vllm_config, self._config
        topology, place = topology_of(vllm_config), place_of_this_worker()
        layers = vllm_config.compilation_config.static_forward_context
        arrangements = arrangements_of(layers, kv_caches, self._kv_cache_config, vllm_config.model_config.dtype)
        caches = discover(
            kv_caches,
            self._kv_cache_config,
            arrangements,
            sharding_of(vllm_config, place),
            interleave=interleave_of(vllm_config, place),
            head_groups=groups_of_heads(vllm_config.model_config.hf_text_config.to_dict()),
        )
        self._index = worker_index(topology, place)
        agent = AgentConfig(backends=config.backends, num_threads=config.num_threads)
        return FerryWorker(
            engine_id=vllm_config.kv_transfer_config.engine_id,
            place=place,
            index=self._index,
            topology=topology,
            facts=facts_of(vllm_config, config),
            groups=groups_of(self._kv_cache_config),
            caches=caches,
            settings=WorkerSettings(
                lease_slots=lease_slots(config, vllm_config),
                handshake_timeout_s=config.handshake_timeout_s,
                load_timeout_s=config.load_timeout_s,
                max_loads=config.max_loads,
                staging_pool_bytes=self._pool_bytes(),
                direct_min_bytes=config.direct_min_bytes,
                host_buffer=uses_host_buffer(vllm_config),
            ),
            make_fabric=lambda name: NixlFabric(name, agent),
        )

    def _pool_bytes(self) -> int | None:
        """The pool's size; an engine that never reads needs none."""
        transfer = self._vllm_config.kv_transfer_config
        if not transfer.is_kv_consumer and not uses_host_buffer(self._vllm_config):
            return 0
        return self._config.staging_pool_bytes
