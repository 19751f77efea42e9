"""Layout discovery: from vLLM's cache tensors to paged tensors.

Strides come from the registered tensors. The meaning of the bytes comes from the cache spec, and for attention from the
backend: see `block_layout` and `mamba_layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvferry.connector.layout.block_layout import BlockLayout, tensor_layouts
from kvferry.connector.layout.mamba_layout import describe_mamba_layout
from kvferry.connector.layout.sharding import Sharding
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Interleave, PagedTensor
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import Device

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_EVERY_TOKEN = Interleave()

STATIC_SCALES = ("NONE", "FP8_PER_TENSOR")
"""Quantisation modes whose scales belong to the weights; others keep scales beside the cache, or change them."""

_EXPECTED = (
    "full attention, MLA, sliding-window or chunked local attention, or the state of a Mamba, a gated delta net, "
    "a short convolution or linear attention"
)
_REASONS = {
    "CircularBufferSpec": "a ring buffer of keys that are not compressed yet",
    "RSWASpec": "a window over answers only, whose gaps are freed",
    "HiddenStateCacheSpec": "hidden states, which no decoder reads",
    "CrossAttentionSpec": "keys of an encoder, which belong to no token of the prompt",
    "EncoderOnlyAttentionSpec": "an encoder's layer, which has no cache",
    "HiSparseHotSpec": "a replica of pages in host memory",
    "HiSparseResidentSpec": "a replica of pages in host memory",
}


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """The cache groups that take part in transfers.

    Raises:
        InvalidConfig: kvferry cannot describe a group; the text names a layer and the reason.
    """
    return tuple(_group(group) for group in kv_cache_config.transfer_groups)


def discover(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    block_layouts: Mapping[str, BlockLayout],
    sharding: Sharding,
    *,
    interleave: Interleave = _EVERY_TOKEN,
    head_groups: int | None = None,
) -> KvCaches:
    """Describe the registered caches.

    Args:
        kv_caches: by layer, the view `[B, H, N, C]`: elements of the cache's dtype for attention, bytes for a state.
        block_layouts: by layer, the block layout of its attention backend, see `probe`.
        interleave: the tokens that this worker holds of caches split by tokens (decode context parallelism).
        head_groups: number of groups that share B and C of a Mamba-2 model, see `groups_of_heads`.

    Raises:
        InvalidConfig: names the layer and why it cannot be described.
    """
    sharding = sharding.checked(_local_heads(kv_cache_config))
    num_blocks = kv_cache_config.num_blocks
    tensors: list[PagedTensor] = []
    # By address: layers are views of few allocations, and each allocation is registered once.
    allocations: dict[int, torch.Tensor] = {}
    for index, group in enumerate(kv_cache_config.transfer_groups):
        # Per group: in vLLM all groups share the same bytes, so an address never identifies a group.
        described: set[tuple[int, ...]] = set()
        for layer in group.layer_names:
            view = kv_caches.get(layer)
            if view is None:
                # It is on another pipeline stage.
                continue
            spec = _layer_spec(group.kv_cache_spec, layer)
            policy, _ = policy_of(layer, spec)
            identity = (view.data_ptr(), *view.shape, *view.stride())
            if identity in described:
                # It shares another layer's cache.
                continue
            described.add(identity)
            allocations.setdefault(view.untyped_storage().data_ptr(), view)
            if policy == "state":
                tensors += describe_mamba_layout(
                    layer,
                    index,
                    spec,
                    view,
                    num_blocks=num_blocks,
                    sharding=sharding,
                    head_groups=head_groups,
                )
            else:
                tensors += _describe_attention(
                    layer,
                    index,
                    spec,
                    view,
                    num_blocks=num_blocks,
                    block_layout=block_layouts.get(layer),
                    sharding=sharding,
                    interleave=interleave if spec.dcp_sharded else _EVERY_TOKEN,
                )
    if not tensors:
        raise InvalidConfig(
            "kv_caches",
            sorted(kv_caches)[:4],
            "at least one layer with a transferable cache",
        )
    registered = tuple(allocations.values())
    return KvCaches(registered, tuple(tensors), Device(registered[0].device))


def policy_of(layer: str, spec: KVCacheSpec) -> tuple[str, int]:
    """A `CacheGroup`'s policy and window for one layer's cache.

    Raises:
        InvalidConfig: names the layer and why its cache cannot be transferred.
    """
    from vllm.v1 import kv_cache_interface as specs

    # By the exact class: a subclass may have other rules.
    kind: Any = type(spec)
    if kind is specs.MambaSpec:
        return ("state", 0)
    # A window that vLLM keeps as full attention (without the hybrid cache manager) holds every token. Blocks of sinks
    # belong to the engine, not to a request.
    if kind in (
        specs.FullAttentionSpec,
        specs.MLAAttentionSpec,
        specs.SinkFullAttentionSpec,
    ):
        # In a layer that is not causal (prefix LM) a token's keys and values depend on later ones.
        policy = ("whole" if spec.non_causal else "full", 0)
    elif kind in (specs.SlidingWindowSpec, specs.SlidingWindowMLASpec):
        if spec.prefix_replay_tokens:
            # A multi-token predictor needs further windows before the last one, which the producer has freed.
            raise _not_transferable(
                layer, kind.__name__, "a window that is computed again after a load"
            )
        policy = ("window", spec.sliding_window + spec.extra_retained_tokens)
    elif kind is specs.ChunkedLocalAttentionSpec:
        policy = ("chunk", spec.attention_chunk_size)
    else:
        raise _not_transferable(layer, kind.__name__, _REASONS.get(kind.__name__, ""))
    _check_states_and_scales(layer, spec)
    return policy


def _not_transferable(layer: str, kind: str, reason: str) -> InvalidConfig:
    what = f"{kind}: {reason}" if reason else kind
    return InvalidConfig(_where(layer), what, _EXPECTED)


def _check_states_and_scales(layer: str, spec: Any) -> None:
    """Refuse caches without one state per token, or with scales that do not belong to the weights."""
    if spec.tokens_per_state != 1:
        raise InvalidConfig(
            _where(layer),
            f"{spec.tokens_per_state} tokens a state",
            "one token a state",
        )
    mode = spec.kv_quant_mode.name
    if mode not in STATIC_SCALES:
        raise InvalidConfig(
            _where(layer), f"quantisation {mode}", f"one of {', '.join(STATIC_SCALES)}"
        )


def _where(layer: str) -> str:
    return f"cache of layer {layer}"


def _group(group: KVCacheGroupSpec) -> CacheGroup:
    from vllm.v1 import kv_cache_interface as specs

    spec = group.kv_cache_spec
    # A pipeline stage may have none of a group's layers; the group's spec covers the whole model.
    layer = next(iter(group.layer_names), "of another stage")
    if group.host_resident or group.role is not specs.KVCacheGroupRole.DEFAULT:
        raise InvalidConfig(
            _where(layer),
            f"in a group of {group.role.value} in host memory",
            "caches in the device's memory (no hisparse_config)",
        )
    if isinstance(spec, specs.UniformTypeKVCacheSpecs):
        policies = {
            policy_of(name, inner) for name, inner in spec.kv_cache_specs.items()
        }
        if policies == {("full", 0), ("whole", 0)}:
            # Where one layer's values depend on the whole prompt, those of the layers above it do too.
            policies = {("whole", 0)}
        if len(policies) != 1:
            raise InvalidConfig(
                _where(layer), sorted(policies), "one policy for the whole group"
            )
        policy, window = policies.pop()
    else:
        policy, window = policy_of(layer, spec)
    return CacheGroup(policy=policy, block_tokens=spec.block_size, window_tokens=window)


def _layer_spec(spec: KVCacheSpec, layer: str) -> Any:
    """The spec of one layer; a group may have one for each of its layers."""
    from vllm.v1 import kv_cache_interface as specs

    if isinstance(spec, specs.UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer]
    return spec


def _local_heads(kv_cache_config: KVCacheConfig) -> Iterator[int]:
    """KV heads on this worker, of every layer whose heads are split over ranks."""
    from vllm.v1 import kv_cache_interface as specs

    everywhere = (specs.MLAAttentionSpec, specs.SlidingWindowMLASpec)
    for group in kv_cache_config.transfer_groups:
        for layer in group.layer_names:
            spec = _layer_spec(group.kv_cache_spec, layer)
            if isinstance(spec, specs.AttentionSpec) and not isinstance(
                spec, everywhere
            ):
                yield spec.num_kv_heads


def _describe_attention(
    layer: str,
    group: int,
    spec: Any,
    view: torch.Tensor,
    *,
    num_blocks: int,
    block_layout: BlockLayout | None,
    sharding: Sharding,
    interleave: Interleave,
) -> list[PagedTensor]:
    """The paged tensors of an attention layer.

    Args:
        num_blocks: the blocks of the cache manager. Each is one or several of the backend's kernel blocks, which are
            the first axis of the view and the blocks of a paged tensor.

    Raises:
        InvalidConfig: the view is none of an attention cache, or its backend is unknown.
    """
    where = _where(layer)
    if view.dim() != 4:
        raise InvalidConfig(
            where,
            f"shape {list(view.shape)}",
            "a view [blocks, heads, tokens, content]",
        )
    if block_layout is None:
        raise InvalidConfig(
            where, "without a layer", "a cache whose attention backend is known"
        )
    kernel_blocks = view.shape[0]
    is_divided = num_blocks > 0 and kernel_blocks % num_blocks == 0
    if not is_divided or spec.block_size % (kernel_blocks // num_blocks):
        raise InvalidConfig(
            where,
            f"{kernel_blocks} kernel blocks",
            f"a multiple of {num_blocks} blocks",
        )
    if view.stride(3) != 1:
        raise InvalidConfig(
            where, f"strides {list(view.stride())}", "contiguous content"
        )
    return [
        tensor_layout.paged_tensor(
            layer,
            group,
            view,
            block_tokens=spec.block_size // (kernel_blocks // num_blocks),
            interleave=interleave,
            quantization=spec.kv_quant_mode.name.lower(),
        )
        for tensor_layout in tensor_layouts(layer, view, spec, block_layout, sharding)
    ]
