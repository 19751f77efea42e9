"""Layout discovery: from vLLM's cache tensors to paged tensors.

Strides come from the registered tensors; what their bytes mean comes from the cache spec and the attention backend. A
backend whose arrangement inside a block is not known for certain is described as one opaque cell a block: it can be
moved between equal engines, and the planner refuses everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_STATIC_SCALES = ("NONE", "FP8_PER_TENSOR")
"""Quantisation modes whose scales belong to the weights; others keep scales beside the cache, or change them."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How heads are spread over the tensor-parallel ranks.

    Attributes:
        total_heads: KV heads of the model.
        rank, size: this worker among the tensor-parallel ranks.
    """

    total_heads: int
    rank: int
    size: int

    def heads(self, local_heads: int) -> Range:
        """The global heads of a layer that has `local_heads` here.

        With fewer heads than ranks each head is on `size / total_heads` ranks in a row.
        """
        if self.total_heads >= self.size:
            return Range(self.rank * local_heads, (self.rank + 1) * local_heads)
        first = self.rank * self.total_heads // self.size
        return Range(first, first + local_heads)


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """The cache groups that take part in transfers.

    Raises:
        InvalidConfig: a group holds what kvferry cannot describe; the text names its first layer and why.
    """
    return tuple(_group(group.layer_names[0], group.kv_cache_spec) for group in kv_cache_config.transfer_groups)


def discover(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    backends: Mapping[str, str],
    sharding: Sharding,
) -> KvCaches:
    """Describe the registered caches.

    Args:
        kv_caches: by layer the view `[B, H, N, C]` in elements of the cache's dtype.
        backends: by layer the packing that its attention backend uses, see `packing_of`.

    Raises:
        InvalidConfig: naming the layer and why it cannot be described.
    """
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
            tensors.append(_describe(layer, index, spec, view, kv_cache_config.num_blocks, backends, sharding))
    if not tensors:
        raise InvalidConfig("kv_caches", sorted(kv_caches)[:4], "at least one layer with a transferable cache")
    return KvCaches(tuple(storages.values()), tuple(tensors), next(iter(storages.values())).device)


def packing_of(layer: Any, layer_name: str) -> str:
    """How a layer's backend arranges the bytes of a block: its name and everything the arrangement depends on."""
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    name = str(backend.get_name()) if backend is not None else type(layer).__name__
    if name != "CPU_ATTN":
        return name.lower()
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = getattr(layer, "isa", None)
    if isa is None:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        isa = _get_attn_isa(
            config.model_config.dtype,
            config.cache_config.block_size,
            layer.head_size,
            getattr(layer, "kv_cache_dtype", None),
        )
    return f"cpu_attn/{isa}"


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


def _describe(
    layer: str,
    group: int,
    spec: Any,
    view: torch.Tensor,
    num_blocks: int,
    packings: Mapping[str, str],
    sharding: Sharding,
) -> PagedTensor:
    _policy(layer, spec)
    if view.dim() != 4:
        raise InvalidConfig(
            f"cache of layer {layer}", f"shape {list(view.shape)}", "a view [blocks, heads, tokens, content]"
        )
    blocks, heads = view.shape[:2]
    if layer not in packings:
        raise InvalidConfig(f"cache of layer {layer}", "without a layer", "a cache whose attention backend is known")
    if spec.kv_quant_mode.name not in _STATIC_SCALES:
        mode = spec.kv_quant_mode.name
        raise InvalidConfig(f"cache of layer {layer}", f"quantisation {mode}", f"one of {', '.join(_STATIC_SCALES)}")
    if spec.tokens_per_state != 1:
        raise InvalidConfig(f"cache of layer {layer}", f"{spec.tokens_per_state} tokens a state", "one token a state")
    if not num_blocks or blocks % num_blocks or spec.block_size % (blocks // num_blocks):
        raise InvalidConfig(f"cache of layer {layer}", f"{blocks} kernel blocks", f"a multiple of {num_blocks} blocks")
    if view.stride(3) != 1:
        raise InvalidConfig(f"cache of layer {layer}", f"strides {list(view.stride())}", "contiguous content")
    item = view.element_size()
    block_tokens = spec.block_size // (blocks // num_blocks)
    is_mla = heads == 1 and type(spec).__name__ == "MLAAttentionSpec"
    cell = _cell([int(n) for n in view.shape[1:]], [int(n) * item for n in view.stride()[1:]], item, layer, packings)
    return PagedTensor(
        layer=layer,
        kind="kv",
        group=group,
        base=view.data_ptr(),
        blocks=blocks,
        block_tokens=block_tokens,
        block_stride=view.stride(0) * item,
        heads=Range(0, 1) if is_mla else cell.heads(sharding, heads),
        head_stride=cell.head_stride,
        tile_tokens=block_tokens,
        tile_stride=0,
        cell_bytes=cell.num_bytes,
        format=Format(
            dtype=str(view.dtype).removeprefix("torch."),
            quantization=spec.kv_quant_mode.name.lower(),
            packing=f"{packings[layer]}/{cell.arrangement}" if cell.whole else packings[layer],
        ),
    )


@dataclass(frozen=True, slots=True)
class _Cell:
    """What cannot be divided: one head of a block, or (`whole`) all local heads of it.

    Attributes:
        arrangement: for a whole block, its axes from the outermost to the innermost with their sizes, e.g.
            `heads2.tokens16.content512`: blocks of equal size may be arranged differently.
    """

    num_bytes: int
    head_stride: int
    whole: bool
    arrangement: str = ""

    def heads(self, sharding: Sharding, local_heads: int) -> Range:
        if not self.whole:
            return sharding.heads(local_heads)
        # An opaque cell is one thing; which heads are in it is told by its place in the engine, so only engines with
        # equal tensor-parallel sizes match.
        return Range(sharding.rank, sharding.rank + 1)


def _cell(shape: Sequence[int], strides: Sequence[int], item: int, layer: str, packings: Mapping[str, str]) -> _Cell:
    heads, states, content = shape
    head_bytes = states * content * item
    if packings[layer].startswith("cpu_attn/") and strides[1] == content * item:
        # Measured, and tested byte by byte: inside a (block, head) the CPU backend packs as it likes; heads are apart.
        return _Cell(head_bytes, strides[0] if heads > 1 else 0, whole=False)
    extent = sum((n - 1) * stride for n, stride in zip(shape, [*strides[:2], item], strict=True)) + item
    if extent != heads * head_bytes:
        raise InvalidConfig(
            f"cache of layer {layer}",
            f"strides {list(strides)} for {list(shape)}",
            "blocks whose bytes lie together (set VLLM_KV_CACHE_LAYOUT to LBHNC)",
        )
    axes = [(strides[0], f"heads{heads}"), (strides[1], f"tokens{states}"), (item, f"content{content}")]
    outermost_first = sorted(
        ((stride, name) for (stride, name), n in zip(axes, shape, strict=True) if n > 1), reverse=True
    )
    return _Cell(extent, 0, whole=True, arrangement=".".join(name for _, name in outermost_first) or "one")
