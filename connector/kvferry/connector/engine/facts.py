"""Facts about the model and this worker's place, translated from vLLM's configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import envs

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.settings import draft_method, settings_of, weights_of
from kvferry.connector.layout.discovery import groups_of
from kvferry.connector.layout.sharding import Sharding, same_in_all_layers
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Interleave, Place, Topology
from kvferry.protocol.handshake import ModelFacts
from kvferry.protocol.hosts import host_is_loopback

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse at start the options that would corrupt caches later.

    Raises:
        InvalidConfig: names the option and the change to make.
    """
    parallel = vllm_config.parallel_config
    uses_ray = parallel.distributed_executor_backend == "ray"
    # vLLM 0.33 has the second one alone, and no such variable.
    has_second_executor = getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    uses_first_ray_executor = uses_ray and not has_second_executor
    if uses_first_ray_executor and parallel.pipeline_parallel_size > 1:
        # This executor passes on only the last stage's reports, so no lease would ever end.
        raise InvalidConfig(
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0", "1 with several pipeline stages"
        )


def uses_host_buffer(vllm_config: VllmConfig) -> bool:
    """Whether transfers go through host memory although the caches are on a device (`kv_buffer_device`)."""
    wants_host_buffer = vllm_config.kv_transfer_config.kv_buffer_device == "cpu"
    has_device = vllm_config.device_config.device_type != "cpu"
    return bool(wants_host_buffer and has_device)


def can_stream(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: FerryConfig
) -> bool:
    """Whether this engine's prompts can be read while they are being computed.

    The scheduler and the workers of an engine decide alike: the workers have rows for the scheduler's orders exactly if
    this is True.

    Raises:
        InvalidConfig: a cache cannot be described.
    """
    groups = groups_of(kv_cache_config)
    if config.streaming == "off":
        return False
    if not vllm_config.kv_transfer_config.is_kv_producer:
        return False
    # The copy in host memory is made when the prompt is complete: until then there is nothing to read.
    if uses_host_buffer(vllm_config):
        return False
    # A drafter writes, after a chunk, entries that depend on the next chunk's tokens.
    if vllm_config.speculative_config is not None:
        return False
    # With a non-causal layer every token's entries change until the prompt is complete.
    if any(group.policy == "whole" for group in groups):
        return False
    # Windows, chunks and states are read at the prompt's end: some cache must grow with the prompt.
    return any(group.holds_every_token for group in groups)


def writes_states_late(vllm_config: VllmConfig) -> bool:
    """Whether recurrent states may be copied into their cached blocks after the end of the step that computed them.

    Where drafts are verified, the state at a block's end is copied into it once it is known how many were accepted. The
    first pipeline stages hear that from the last one, some steps later (`update_pp_decode_requests` of vLLM's second
    model runner), or never, when the request has ended before.
    """
    has_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    return has_stages and vllm_config.speculative_config is not None


def caches_uncomputed_blocks(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's prefix cache may have blocks that no step computes.

    With priorities, `Scheduler.schedule` may preempt a request that it has scheduled in the same call. It takes the
    request out of the step, but leaves the hashes of the blocks that the step was to fill.
    """
    return bool(vllm_config.scheduler_config.policy == "priority")


def steps_alone(vllm_config: VllmConfig) -> bool:
    """True if no other engine waits for this one's steps: a step that computes nothing may then take a moment.

    No other pipeline stage has a micro-batch for it, and no other data-parallel rank waits at the next collective
    operation.
    """
    parallel = vllm_config.parallel_config
    return bool(
        parallel.pipeline_parallel_size == 1 and parallel.data_parallel_size == 1
    )


@dataclass(frozen=True, slots=True)
class Siblings:
    """The other data-parallel ranks to which this engine's front end gives prompts.

    Attributes:
        ports: the side channels of those that are known to be on this host.
        are_all: whether there are no others. Where there are, a consumer that knows one rank's address may ask in vain
            for a prompt: it is on a rank that nobody has named.
    """

    ports: tuple[int, ...]
    are_all: bool


def siblings_of(vllm_config: VllmConfig) -> Siblings:
    """The other data-parallel ranks of this engine."""
    parallel = vllm_config.parallel_config
    base_port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    own_rank = parallel.data_parallel_index
    ranks, are_all = _ranks_here(parallel)
    return Siblings(
        ports=tuple(base_port + rank for rank in ranks if rank != own_rank),
        are_all=are_all,
    )


def _ranks_here(parallel: ParallelConfig) -> tuple[range, bool]:
    """The data-parallel ranks on this host, as far as they are known, and whether the front end has no others."""
    own_rank = parallel.data_parallel_index
    first_rank = own_rank - (parallel.data_parallel_rank_local or 0)
    is_spread_by_ray = parallel.data_parallel_backend == "ray"
    if parallel.data_parallel_size > 1 and not is_spread_by_ray:
        num_here = parallel.data_parallel_size_local
        has_front_end_here = (
            parallel.data_parallel_hybrid_lb or parallel.data_parallel_external_lb
        )
        is_whole = num_here == parallel.data_parallel_size
        are_all = (has_front_end_here or is_whole) and not parallel.enable_elastic_ep
        return range(first_rank, first_rank + num_here), are_all
    # vLLM tells each rank of a dense model that it is alone (`ParallelConfig.reconfigure_for_independent_dp_rank`),
    # though one front end distributes prompts over all of them. This field alone still says how many there are.
    num_ranks = parallel.elastic_ep_max_dp_size
    if num_ranks == 1:
        return range(own_rank, own_rank + 1), True
    # Ranks on other hosts would not find the first one at its loopback address.
    is_one_host = host_is_loopback(parallel.data_parallel_master_ip)
    if is_one_host and not (is_spread_by_ray or parallel.data_parallel_hybrid_lb):
        return range(num_ranks), True
    # No more than these are certainly here. What listens on the next port may be another program.
    return range(first_rank, own_rank + 1), False


def lease_slots(config: FerryConfig, vllm_config: VllmConfig) -> int:
    """Slots of the lease table. Scheduler and workers of one engine must use the same number."""
    return config.lease_slots or max(
        1024, 4 * vllm_config.scheduler_config.max_num_seqs
    )


def topology_of(vllm_config: VllmConfig) -> Topology:
    """The engine's parallel sizes."""
    parallel = vllm_config.parallel_config
    return Topology(
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        tp=parallel.tensor_parallel_size,
        dcp=parallel.decode_context_parallel_size,
    )


def place_of_this_worker() -> Place:
    """The place of this process among its engine's workers; vLLM's process groups must exist."""
    from vllm.distributed import parallel_state

    return Place(
        pp=parallel_state.get_pp_group().rank_in_group,
        pcp=parallel_state.get_pcp_group().rank_in_group,
        tp=parallel_state.get_tensor_model_parallel_rank(),
        dcp=parallel_state.get_dcp_group().rank_in_group,
    )


def interleave_of(vllm_config: VllmConfig, place: Place) -> Interleave:
    """The tokens that this worker holds of caches split by decode context parallelism (`spec.dcp_sharded`).

    vLLM decides the length of the runs once it knows its block sizes, before workers register their caches.
    """
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return Interleave()
    return Interleave(
        ranks=parallel.decode_context_parallel_size,
        rank=place.dcp,
        run_tokens=parallel.cp_kv_cache_interleave_size,
    )


def worker_index(topology: Topology, place: Place) -> int:
    """A worker's index in its engine: by pipeline stage, then prefill-context-parallel rank, then tensor rank."""
    return (place.pp * topology.pcp + place.pcp) * topology.tp + place.tp


def num_workers(topology: Topology) -> int:
    """The number of workers of an engine, as numbered by `worker_index`."""
    return topology.pp * topology.pcp * topology.tp


def sharding_of(vllm_config: VllmConfig, place: Place) -> Sharding:
    """The sharding of the KV heads of the model and its drafter over the tensor-parallel ranks."""
    model = vllm_config.model_config
    total_heads = model.get_total_num_kv_heads()
    is_uniform = same_in_all_layers(total_heads, model.hf_text_config.to_dict())
    speculative = vllm_config.speculative_config
    draft = None
    if speculative is not None:
        draft = speculative.draft_model_config
    if draft is not None:
        # The drafter's layers are in the same caches: one with other heads makes the sharding of all uncertain.
        is_uniform = (
            is_uniform
            and draft.get_total_num_kv_heads() == total_heads
            and same_in_all_layers(total_heads, draft.hf_text_config.to_dict())
        )
    return Sharding(
        total_heads=total_heads,
        rank=place.tp,
        size=vllm_config.parallel_config.tensor_parallel_size,
        uniform=is_uniform,
    )


def facts_of(vllm_config: VllmConfig, config: FerryConfig) -> ModelFacts:
    """The facts that must be equal on both sides."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype == "auto":
        cache_dtype = dtype
    return ModelFacts(
        model=str(model.model)[:512],
        fingerprint=config.model_fingerprint or _fingerprint(vllm_config),
        dtype=dtype,
        cache_dtype=cache_dtype,
        quantization=str(model.quantization or "none"),
        max_model_tokens=model.max_model_len,
        speculative=draft_method(vllm_config),
        settings=settings_of(vllm_config),
    )


def _fingerprint(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    weights = weights_of(model, vllm_config)
    has_no_files = weights.startswith("config:")
    if has_no_files and str(vllm_config.load_config.load_format) != "dummy":
        logger.warning(
            "no weight files of %s are on this machine: engines with other weights of this configuration would be "
            "treated as equal; name the weights with model_fingerprint",
            model.model,
        )
    return weights
