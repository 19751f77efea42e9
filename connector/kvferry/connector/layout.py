"""Layout discovery: from vLLM's cache tensors to paged tensors.

Strides come from the registered tensors; what their bytes mean comes from the cache spec and the attention backend, see
`arrangement`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvferry.connector.arrangement import parts_of
from kvferry.connector.sharding import Sharding
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Format, PagedTensor
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_STATIC_SCALES = ("NONE", "FP8_PER_TENSOR")
"""Quantisation modes whose scales belong to the weights; others keep scales beside the cache, or change them."""


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """The cache groups that take part in transfers.

    Raises:
        InvalidConfig: a group holds what kvferry cannot describe; the text names its first layer and why.
    """
    # A pipeline stage may have none of a group's layers; the group's spec is the whole model's.
    return tuple(
        _group(next(iter(group.layer_names), "of another stage"), group.kv_cache_spec)
        for group in kv_cache_config.transfer_groups
    )


def discover(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    packings: Mapping[str, str],
    sharding: Sharding,
) -> KvCaches:
    """Describe the registered caches.

    Args:
        kv_caches: by layer the view `[B, H, N, C]` in elements of the cache's dtype.
        packings: by layer how its attention backend arranges a block, see `packing_of`.

    Raises:
        InvalidConfig: naming the layer and why it cannot be described.
    """
    sharding = sharding.checked(_local_heads(kv_cache_config))
    tensors: list[PagedTensor] = []
    storages: dict[int, torch.Tensor] = {}
    for index, group in enumerate(kv_cache_config.transfer_groups):
        seen: set[tuple[int, tuple[int, ...]]] = set()  # not across groups: vLLM lays all of them over the same bytes
        for layer in group.layer_names:
            view = kv_caches.get(layer)
            if view is None:
                continue  # a layer of another pipeline stage
            spec = _layer_spec(group.kv_cache_spec, layer)
            identity = (view.data_ptr(), tuple(view.stride()))
            if identity in seen:
                continue  # a layer that shares another's cache
            seen.add(identity)
            storages.setdefault(view.untyped_storage().data_ptr(), view)
            tensors += _describe(layer, index, spec, view, kv_cache_config.num_blocks, packings, sharding)
    if not tensors:
        raise InvalidConfig("kv_caches", sorted(kv_caches)[:4], "at least one layer with a transferable cache")
    return KvCaches(tuple(storages.values()), tuple(tensors), next(iter(storages.values())).device)


def _group(first_layer: str, spec: KVCacheSpec) -> CacheGroup:
    from vllm.v1 import kv_cache_interface as specs

    if isinstance(spec, specs.UniformTypeKVCacheSpecs):
        policies = {_policy(layer, inner) for layer, inner in spec.kv_cache_specs.items()}
        if len(policies) != 1:
            raise InvalidConfig(f"cache of layer {first_layer}", sorted(policies), "one policy for the whole group")
        (policy, window) = policies.pop()
    else:
        policy, window = _policy(first_layer, spec)
    return CacheGroup(policy=policy, block_tokens=spec.block_size, window_tokens=window)


def _policy(layer: str, spec: KVCacheSpec) -> tuple[str, int]:
    from vllm.v1 import kv_cache_interface as specs

    if type(spec) in (specs.FullAttentionSpec, specs.MLAAttentionSpec):
        return ("full", 0)
    if type(spec) is specs.SlidingWindowSpec:
        return ("window", spec.sliding_window)
    raise InvalidConfig(
        f"cache of layer {layer}", type(spec).__name__, "full attention, MLA or sliding-window attention"
    )


def _layer_spec(spec: KVCacheSpec, layer: str) -> Any:
    from vllm.v1 import kv_cache_interface as specs

    return spec.kv_cache_specs[layer] if isinstance(spec, specs.UniformTypeKVCacheSpecs) else spec


def _local_heads(kv_cache_config: KVCacheConfig) -> Iterator[int]:
    """KV heads on this worker, of every layer whose heads are shared out."""
    from vllm.v1 import kv_cache_interface as specs

    for group in kv_cache_config.transfer_groups:
        for layer in group.layer_names:
            spec = _layer_spec(group.kv_cache_spec, layer)
            if type(spec) in (specs.FullAttentionSpec, specs.SlidingWindowSpec):
                yield spec.num_kv_heads


def _describe(
    layer: str,
    group: int,
    spec: Any,
    view: torch.Tensor,
    num_blocks: int,
    packings: Mapping[str, str],
    sharding: Sharding,
) -> list[PagedTensor]:
    _policy(layer, spec)
    where = f"cache of layer {layer}"
    if view.dim() != 4:
        raise InvalidConfig(where, f"shape {list(view.shape)}", "a view [blocks, heads, tokens, content]")
    if layer not in packings:
        raise InvalidConfig(where, "without a layer", "a cache whose attention backend is known")
    mode = spec.kv_quant_mode.name
    if mode not in _STATIC_SCALES:
        raise InvalidConfig(where, f"quantisation {mode}", f"one of {', '.join(_STATIC_SCALES)}")
    if spec.tokens_per_state != 1:
        raise InvalidConfig(where, f"{spec.tokens_per_state} tokens a state", "one token a state")
    blocks = view.shape[0]
    if not num_blocks or blocks % num_blocks or spec.block_size % (blocks // num_blocks):
        raise InvalidConfig(where, f"{blocks} kernel blocks", f"a multiple of {num_blocks} blocks")
    if view.stride(3) != 1:
        raise InvalidConfig(where, f"strides {list(view.stride())}", "contiguous content")
    dtype = str(view.dtype).removeprefix("torch.")
    return [
        PagedTensor(
            layer=layer,
            kind=part.kind,
            group=group,
            base=view.data_ptr() + part.offset,
            blocks=blocks,
            block_tokens=spec.block_size // (blocks // num_blocks),
            block_stride=view.stride(0) * view.element_size(),
            heads=part.heads,
            head_stride=part.head_stride,
            tile_tokens=part.tile_tokens,
            tile_stride=part.tile_stride,
            cell_bytes=part.cell_bytes,
            element_bytes=part.element_bytes,
            element_stride=part.element_stride,
            format=Format(dtype=dtype, quantization=mode.lower(), packing=part.packing),
        )
        for part in parts_of(layer, view, spec, packings[layer], sharding)
    ]
