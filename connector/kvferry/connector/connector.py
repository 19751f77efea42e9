"""`FerryConnector`: the class that vLLM loads, in its scheduler and in each worker. It only forwards calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.connector.config import check_role, read_config
from kvferry.connector.engine.facts import check_supported
from kvferry.connector.logs import join_vllm_log
from kvferry.connector.messages import FerryMetadata
from kvferry.connector.metrics.prometheus import FerryPromMetrics
from kvferry.connector.metrics.stats import FerryStats
from kvferry.connector.plugin import register
from kvferry.connector.scheduler_side.side import SchedulerSide
from kvferry.connector.vllm.sleep import can_sleep, follow_sleep, guard_sleep
from kvferry.connector.worker_side.side import WorkerSide
from kvferry.protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class FerryConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector.

    Tested with vLLM 0.32 and 0.33. A hook that only one of them calls has no effect in the other. The hooks of a sleep
    are 0.33's; under 0.32 the adapter calls them (`connector/vllm/sleep.py`).

    Attributes:
        scheduler_side: the part in the scheduler's process; in a worker its use raises LocalProtocolError.
        worker_side: the part in a worker's process; in the scheduler its use raises LocalProtocolError.
    """

    scheduler_side: SchedulerSide
    worker_side: WorkerSide

    # vLLM reads this attribute to attribute the tokens of a load (`get_external_cache_hit_sources`).
    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_log()
        transfer = vllm_config.kv_transfer_config
        config = read_config(transfer.kv_connector_extra_config, transfer.kv_connector)
        check_supported(vllm_config)
        check_role(config, transfer.kv_role)
        # Each process has one of the two, see `__getattr__`.
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = SchedulerSide(vllm_config, kv_cache_config, config)
            try:
                if can_sleep(vllm_config):
                    follow_sleep(transfer.engine_id, self.scheduler_side)
            except BaseException:
                self.scheduler_side.close()
                raise
        else:
            self.worker_side = WorkerSide(vllm_config, kv_cache_config, config)
            if can_sleep(vllm_config):
                guard_sleep(self.worker_side)

    if not TYPE_CHECKING:  # mypy would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Called for what this object has not, such as the side of the other role."""
            if name == "scheduler_side":
                raise LocalProtocolError("a scheduler's hook was called in a worker")
            if name == "worker_side":
                raise LocalProtocolError("a worker's hook was called in the scheduler")
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # Class methods.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads before tokens: then a head range of a block is one run, and so is a whole block."""
        model = vllm_config.model_config
        if model is None or model.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """True: the caches are withdrawn before their pages go, and registered again when they are back."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FerryStats:
        if data is None:
            return FerryStats()
        return FerryStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FerryPromMetrics:
        return FerryPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    # The scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.life.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # None: vLLM asks again in the next step. True: the load is asynchronous, so the request waits without a step.
        matched = self.scheduler_side.life.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All transferred groups: a load writes the request's own blocks in each."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.life.admitted(request, blocks, num_external_tokens)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        if self.scheduler_side.tracing is not None:
            self.scheduler_side.tracing.scheduled(scheduler_output)
        preempted = scheduler_output.preempted_req_ids or ()
        return self.scheduler_side.engine_step.begin(
            scheduler_output.num_scheduled_tokens,
            preempted,
            total=scheduler_output.total_num_scheduled_tokens,
            loads=scheduler_output.has_sync_kv_loads,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.engine_step.end(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.life.ended(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.life.ended(request, block_ids)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.described(metadata.values())

    def has_pending_block_frees(self) -> bool:
        """Whether vLLM should make a running request wait for a step instead of preempting one."""
        return self.scheduler_side.eviction.is_coming

    def has_pending_push_work(self) -> bool:
        """Whether the engine must step although it has no requests."""
        return (
            self.role is KVConnectorRole.SCHEDULER and self.scheduler_side.must_step()
        )

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.life.reset()

    # The worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Withdraw the caches: vLLM takes their pages away when this returns, and keeps them if it raises."""
        self.worker_side.withdraw()

    def restore_kv_caches(self) -> None:
        """The pages are back at their addresses, with any content: register them again."""
        self.worker_side.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        is_child = has_kv_transfer_group() and get_kv_transfer_group() is not self
        return self.worker_side.describe(is_child=is_child)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the step's transfers, before the forward pass, so that they overlap with it."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, FerryMetadata):
            self.worker_side.bind(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Does nothing: `bind_connector_metadata` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end between steps, never within one."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Does nothing: consumers read the blocks where they are."""

    def wait_for_save(self) -> None:
        """Waits for nothing; vLLM calls it when it has launched all of the step's work."""
        self.worker_side.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.worker_side.take_results()
        return results.finished_sending, results.finished_recving

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        return self.worker_side.take_results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.take_metadata()

    # Both.

    def get_kv_connector_stats(self) -> FerryStats | None:
        if self.role is KVConnectorRole.SCHEDULER:
            return self.scheduler_side.monitor.take_stats()
        return self.worker_side.take_stats()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler_side.close()
        else:
            self.worker_side.close()


# MultiConnector looks classes up by name, even if VLLM_PLUGINS leaves the plugin out.
register()
