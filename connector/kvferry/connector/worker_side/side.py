"""The connector in a worker's process: connects vLLM's hooks to the worker."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.facts import (
    facts_of,
    interleave_of,
    lease_slots,
    place_of_this_worker,
    sharding_of,
    topology_of,
    uses_host_buffer,
    worker_index,
)
from kvferry.connector.engine.local_engine import row_blocks
from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.mamba_layout import groups_of_heads
from kvferry.connector.layout.probe import block_layouts_of
from kvferry.connector.messages import (
    FerryHandshake,
    FerryMetadata,
    FerryWorkerMetadata,
    engine_groups,
    gather_workers,
)
from kvferry.connector.metrics.stats import FerryStats, PeerLabels
from kvferry.connector.tracing.worker_events import WorkerTracing, worker_tracing
from kvferry.connector.vllm.sleep import unguard_sleep
from kvferry.link.allowed_hosts import allowed_hosts_of
from kvferry.link.secrets import secrets_from_environment
from kvferry.protocol.geometry import Place
from kvferry.trace.events import LoadEnded
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.nixl import AgentConfig, NixlFabric
from kvferry.worker.loads.results import StepResults
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from kvferry.worker.worker import FerryWorker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


_IDLE_STEP_TIMEOUT_S = 2e-3
"""Time that a step that computes nothing waits for a load.

Without it vLLM would sleep and step again. With it a load of a few megabytes is reported in the step that ordered it,
and an engine that waits for a long one steps less often.
"""


class WorkerSide:
    """The worker side of one worker.

    Attributes:
        worker: None before vLLM registers the caches.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: FerryConfig,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self.worker: FerryWorker | None = None
        self._index = 0
        self._handshake: FerryHandshake | None = None
        self._step = StepResults()
        self._has_reported = True
        self._labels = PeerLabels(config.max_peer_labels)
        self._wants_report = False
        self._is_idle = False
        self._is_child = False
        self._watch = StepWatch(vllm_config.max_concurrent_batches)
        self._tracing: WorkerTracing | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and register the caches, and exchange descriptions with the engine's other workers (collective).

        If it fails, nothing stays open.

        Raises:
            InvalidConfig: a cache cannot be described.
            SiblingFailed: another worker of this engine has failed.
            FabricError: NIXL cannot be used, or refuses the memory.
        """
        try:
            self._register(kv_caches)
        except BaseException:
            self.close()
            raise

    def describe(self, *, is_child: bool = False) -> FerryHandshake | None:
        """The descriptions of this worker and its replicas, for peers; None before the caches exist.

        Args:
            is_child: whether this connector is a child of a MultiConnector.
        """
        if self.worker is not None:
            # vLLM asks when it has captured its graphs, perhaps long before the first step. From now on peers can send
            # notifications, and NIXL keeps them, of any size, until the worker's thread takes them.
            self.worker.start()
        if self._handshake is None:
            return None
        self._is_child = is_child
        return replace(self._handshake, is_child=is_child)

    def withdraw(self) -> None:
        """Withdraw the caches, on all workers of the engine or on none (collective). When it returns, their pages may
        go. Idempotent.

        Raises:
            WithdrawalRefused: reads may still write into this worker's caches; leases and loads are over.
            SiblingFailed: another worker has raised that.
        """
        worker = self.worker
        if worker is None:
            return
        groups = engine_groups()
        started_s = time.monotonic()
        try:
            worker.drain()
        except Exception as error:
            gather_workers(error, groups)
            raise
        try:
            gather_workers(worker.description, groups)
        except BaseException:
            # A sibling keeps its pages, so vLLM keeps those of all: this worker serves as before.
            worker.keep()
            raise
        worker.deregister()
        logger.info(
            "worker %s has withdrawn its caches in %.3f s",
            worker.description.place,
            time.monotonic() - started_s,
        )

    def restore(self) -> None:
        """Register the caches again, whose pages are back, and exchange the new descriptions (collective). Idempotent.

        Raises:
            SiblingFailed: another worker has failed; it can be called again.
            FabricError: NIXL refuses the memory; likewise.
        """
        worker = self.worker
        if worker is None:
            return
        groups = engine_groups()
        try:
            worker.restore()
        except Exception as error:
            gather_workers(error, groups)
            raise
        self._meet_siblings(worker, groups)

    def bind(self, metadata: FerryMetadata) -> None:
        """Start the step's orders, which run in parallel with the forward pass."""
        # The step before has been launched. It is ended here too, because with drafts vLLM's first model runner does
        # not say so on the pipeline stages before the last one.
        self._watch.end()
        self.end_step()
        self._watch.begin()
        self._wants_report |= metadata.wants_report
        self._is_idle = metadata.is_idle
        if metadata.head and self.worker is not None:
            self.worker.carry_out(metadata.head, metadata.frame)

    def end_step(self) -> None:
        """The step's forward pass has been launched, drafters included, or it has raised."""
        if self.worker is None:
            return
        if self._watch.has_raised():
            self.worker.fail_step()
        else:
            self.worker.end_step()

    def take_results(self) -> KVConnectorTransferResults:
        """The loads that ended since the last step. `take_stats` and `take_metadata` return the step's other results.

        Ended leases are not reported here, since vLLM does not hold their blocks: see `take_metadata`.
        """
        # Both runners take the results of every step that does not raise.
        self._watch.has_reported = True
        if self._watch.has_raised():
            # vLLM throws this step's output away. What there is to report waits for a good step: reported here it would
            # be lost, and the blocks would stay held.
            self.end_step()
            self._step = StepResults()
            return KVConnectorTransferResults()
        if self.worker is None:
            self._step = StepResults()
        else:
            timeout_s = _IDLE_STEP_TIMEOUT_S if self._is_idle else 0.0
            self._step = self.worker.take_results(timeout_s)
        self._has_reported = False
        if self._tracing is not None and self._step.load_records:
            self._tracing.ended(self._step.load_records)
        sent: set[str] = set()
        if self._is_child:
            # Another child may hold the request's blocks. vLLM would free them at the first of two reports, and end the
            # engine at the second (vllm#46240). So this child holds the blocks of aborted loads too, as if they were
            # being sent: MultiConnector counts its children that hold a request.
            sent = self._step.over_cancels
        failed = set(self._step.failed)
        return KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving=self._step.loaded | failed,
            failed_recving=failed,
        )

    def take_stats(self) -> FerryStats | None:
        """Statistics of the step whose results were taken last."""
        if self._has_reported:
            return None
        self._has_reported = True
        return FerryStats.from_results(self._step, self._labels)

    def take_metadata(self) -> FerryWorkerMetadata | None:
        """Ended leases and loads; if changed, requests whose blocks may still be written, and the worker's gauges."""
        if self._watch.has_raised():
            return None
        step = self._step
        ended: tuple[LoadEnded, ...] = ()
        if self._tracing is not None:
            ended = self._tracing.take()
        reports_leases = bool(step.sent) or self._wants_report
        has_news = (
            step.still_written is not None or step.gauges is not None or bool(ended)
        )
        if not reports_leases and not has_news:
            return None
        metadata = FerryWorkerMetadata()
        if step.still_written is not None:
            metadata.still_written[self._index] = step.still_written
        if reports_leases:
            metadata.sent[self._index] = frozenset(step.sent)
        if step.gauges is not None:
            metadata.gauges[self._index] = step.gauges
        if ended:
            metadata.loads[self._index] = ended
        # Each is reported once.
        step.still_written = None
        step.sent = set()
        step.gauges = None
        self._wants_report = False
        return metadata

    def close(self) -> None:
        """Stop the thread and release the memory. Idempotent."""
        unguard_sleep(self)
        if self.worker is not None:
            self.worker.close()
        if self._tracing is not None:
            self._tracing.close()

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        started_s = time.monotonic()
        groups = engine_groups()
        try:
            self.worker = self._make_worker(kv_caches)
        except Exception as error:
            # The other workers wait in the same collective call. They get the error and stop too; then it is raised.
            gather_workers(error, groups)
            raise
        self._meet_siblings(self.worker, groups)
        logger.info(
            "worker %s registered %d paged tensors in %.2f s",
            self.worker.description.place,
            len(self.worker.description.tensors),
            time.monotonic() - started_s,
        )

    def _meet_siblings(self, worker: FerryWorker, groups: list[ProcessGroup]) -> None:
        """Exchange descriptions with the engine's other workers (collective). Raises as `gather_workers`."""
        siblings = gather_workers(worker.description, groups)
        worker.add_siblings(siblings)
        self._handshake = FerryHandshake.from_workers(
            worker.description.place, siblings
        )

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> FerryWorker:
        vllm_config = self._vllm_config
        config = self._config
        topology = topology_of(vllm_config)
        place = place_of_this_worker()
        self._index = worker_index(topology, place)
        self._tracing = worker_tracing(vllm_config, config, place)
        agent = AgentConfig(backends=config.backends, num_threads=config.num_threads)
        return FerryWorker(
            engine_id=vllm_config.kv_transfer_config.engine_id,
            place=place,
            index=self._index,
            topology=topology,
            facts=facts_of(vllm_config, config),
            groups=groups_of(self._kv_cache_config),
            caches=self._describe_caches(kv_caches, place),
            settings=self._worker_settings(),
            make_fabric=lambda name: NixlFabric(name, agent),
        )

    def _describe_caches(
        self, kv_caches: dict[str, torch.Tensor], place: Place
    ) -> KvCaches:
        vllm_config = self._vllm_config
        block_layouts = block_layouts_of(
            vllm_config.compilation_config.static_forward_context,
            kv_caches,
            self._kv_cache_config,
            vllm_config.model_config.dtype,
        )
        model_config = vllm_config.model_config.hf_text_config.to_dict()
        return discover(
            kv_caches,
            self._kv_cache_config,
            block_layouts,
            sharding_of(vllm_config, place),
            interleave=interleave_of(vllm_config, place),
            head_groups=groups_of_heads(model_config),
        )

    def _worker_settings(self) -> WorkerSettings:
        vllm_config = self._vllm_config
        config = self._config
        secrets = secrets_from_environment()
        own_host = envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        is_producer = vllm_config.kv_transfer_config.is_kv_producer
        return WorkerSettings(
            lease_slots=lease_slots(config, vllm_config),
            handshake_timeout_s=config.handshake_timeout_s,
            load_timeout_s=config.load_timeout_s,
            max_loads=config.max_loads,
            staging_pool_bytes=self._pool_bytes(),
            direct_min_bytes=config.direct_min_bytes,
            host_buffer=uses_host_buffer(vllm_config),
            is_read_from=is_producer or config.bidirectional_kv_xfer,
            row_blocks=row_blocks(vllm_config, self._kv_cache_config, config),
            secrets=secrets,
            allowed_hosts=allowed_hosts_of(config.allowed_hosts, secrets, own_host),
            peer_ttl_s=config.engine_ttl,
            max_peers=config.max_peers,
            failed_read_grace_s=config.failed_read_grace_s,
            mapped_reads=MappedReadsOption(config.mapped_reads),
        )

    def _pool_bytes(self) -> int | None:
        """The staging pool's size; 0 for an engine that neither reads nor copies to host memory."""
        is_consumer = self._vllm_config.kv_transfer_config.is_kv_consumer
        reads = is_consumer or self._config.bidirectional_kv_xfer
        if reads or uses_host_buffer(self._vllm_config):
            return self._config.staging_pool_bytes
        return 0


class StepWatch:
    """Finds out whether the step of one worker has raised, which vLLM does not tell a connector.

    vLLM throws such a step's output away, but the worker may live on. Without this watch its prompts would become READY
    like any other, and a decoder would read what was never written.

    Args:
        max_steps: the most steps in flight.

    Attributes:
        has_reported: whether the results of the step before were taken.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._bad_steps = 0
        self._handled: BaseException | None = None
        self.has_reported = True

    def has_raised(self) -> bool:
        """Whether what the present step computes must not be read."""
        # vLLM's first model runner calls the hooks of a step's end in a `finally`: if the step has raised, an exception
        # is being handled that was not when the step began.
        if sys.exc_info()[1] is not self._handled:
            self._count_bad_step()
        return self._bad_steps > 0

    def end(self) -> None:
        """Another step is about to begin."""
        # vLLM's second model runner leaves the hooks of a step's end out if the step has raised.
        if not self.has_reported:
            self._count_bad_step()

    def begin(self) -> None:
        """A step begins."""
        self._bad_steps = max(0, self._bad_steps - 1)
        # The caller may be handling another error all the while.
        self._handled = sys.exc_info()[1]
        self.has_reported = False

    def _count_bad_step(self) -> None:
        # Where steps overlap, some more have been scheduled before vLLM hears of it. They may go on from what was not
        # written, so they are bad too.
        self._bad_steps = self._max_steps
