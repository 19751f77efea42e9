"""How the bytes of a cache block are arranged: what a backend's paged tensors are.

Strides say where things are only when it is known what is there. That is known for `_PLAIN_ON_CPU` and `_PLAIN_MLA`,
which a test confirms byte by byte with vLLM's own cache writes. Whatever is not known is opaque: one cell, movable
between equal engines, in a format that no other arrangement has.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.connector.sharding import Sharding
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Range

PLAIN = "plain"
"""The packing of cells whose strides say everything."""

_PLAIN_ON_CPU = frozenset(
    (isa, dtype) for isa in ("vec", "vec16") for dtype in (torch.bfloat16, torch.float16, torch.float32)
)
"""Instruction sets and dtypes of CPU attention that keep K as `[D, N]` and V as `[N, D]` in every (block, head)."""

_PLAIN_MLA = ("cpu_mla",)
"""Backends that keep one row `[latent | rope]` a token."""


@dataclass(frozen=True, slots=True)
class Part:
    """One paged tensor of a layer, as `PagedTensor` has it; `offset` is from the layer's first byte to its first."""

    kind: str
    heads: Range
    head_stride: int
    cell_bytes: int
    packing: str
    tile_tokens: int
    tile_stride: int = 0
    offset: int = 0
    element_bytes: int = 0
    element_stride: int = 0


def packing_of(layer: Any, layer_name: str) -> str:
    """How a layer's backend arranges the bytes of a block: its name and everything the arrangement depends on.

    For float8 that includes which one it is: vLLM keeps every kind in a cache of bytes, under one quantisation mode.
    """
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    name = str(backend.get_name()) if backend is not None else type(layer).__name__
    stored = _float8_of(layer)
    if name != "CPU_ATTN":
        return name.lower() + stored
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
    return f"cpu_attn/{isa}{stored}"


def _float8_of(layer: Any) -> str:
    """What a layer's cache holds, where its dtype does not tell; vLLM's `fp8` is its `fp8_e4m3`."""
    cache_dtype = str(getattr(layer, "kv_cache_dtype", None))
    if not cache_dtype.startswith("fp8"):
        return ""
    return "/fp8_e4m3" if cache_dtype == "fp8" else f"/{cache_dtype}"


def parts_of(layer: str, view: torch.Tensor, spec: Any, packing: str, sharding: Sharding) -> tuple[Part, ...]:
    """What a layer's cache consists of.

    Args:
        view: `[B, H, N, C]`, content contiguous.
        packing: see `packing_of`.

    Raises:
        InvalidConfig: the bytes of an opaque block do not lie together.
    """
    is_mla = view.shape[1] == 1 and type(spec).__name__ == "MLAAttentionSpec"
    if is_mla and packing in _PLAIN_MLA:
        return (_mla(view),)
    if packing.startswith("cpu_attn/") and view.stride(2) == view.shape[3]:
        return _of_cpu_attention(view, spec, packing, sharding)
    return (_opaque_block(layer, view, packing, sharding, is_mla=is_mla),)


def _mla(view: torch.Tensor) -> Part:
    row = view.element_size()
    return Part("mla", Range(0, 1), 0, view.shape[3] * row, PLAIN, 1, view.stride(2) * row)


def _of_cpu_attention(view: torch.Tensor, spec: Any, packing: str, sharding: Sharding) -> tuple[Part, ...]:
    """K and V where the arrangement inside a (block, head) is known, else one cell a (block, head)."""
    _, heads, tokens, content = (int(n) for n in view.shape)
    item = view.element_size()
    stride = view.stride(1) * item if heads > 1 else 0
    held, suffix = _heads(sharding, heads)
    isa = packing.removeprefix("cpu_attn/")
    known = platform.machine() == "x86_64" and (isa, view.dtype) in _PLAIN_ON_CPU and spec.kv_quant_mode.name == "NONE"
    if not known or (heads, content) != (spec.num_kv_heads, 2 * spec.head_size):
        return (Part("kv", held, stride, tokens * content * item, packing + suffix, tokens),)
    width = spec.head_size * item
    apart = {"tile_stride": item, "element_bytes": item, "element_stride": tokens * item}
    return (
        Part("k", held, stride, width, PLAIN + suffix, 1, **apart),
        Part("v", held, stride, width, PLAIN + suffix, 1, tile_stride=width, offset=tokens * width),
    )


def _heads(sharding: Sharding, local_heads: int) -> tuple[Range, str]:
    """The heads, and what the format says of them: where only the rank is known, ranks of equally many match."""
    known = sharding.heads(local_heads)
    if known is not None:
        return known, ""
    return Range(sharding.rank * local_heads, (sharding.rank + 1) * local_heads), _rank_of(sharding)


def _rank_of(sharding: Sharding) -> str:
    return f"/tp{sharding.size}" if sharding.size > 1 else ""


def _opaque_block(layer: str, view: torch.Tensor, packing: str, sharding: Sharding, *, is_mla: bool) -> Part:
    """All local heads of a block as one cell. Its axes belong to the format, from the outermost to the innermost with
    their sizes, e.g. `heads2.tokens16.content512`: blocks of equal size may be arranged differently."""
    item = view.element_size()
    heads, tokens, content = shape = tuple(int(n) for n in view.shape[1:])
    strides = tuple(int(n) * item for n in view.stride()[1:])
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + item
    if extent != heads * tokens * content * item:
        raise InvalidConfig(
            f"cache of layer {layer}",
            f"strides {list(strides)} for {list(shape)}",
            "blocks whose bytes lie together (set VLLM_KV_CACHE_LAYOUT to LBHNC)",
        )
    axes = zip(strides, (f"heads{heads}", f"tokens{tokens}", f"content{content}"), shape, strict=True)
    arrangement = ".".join(name for _, name, n in sorted(axes, reverse=True) if n > 1) or "one"
    if is_mla:
        return Part("kv", Range(0, 1), 0, extent, f"{packing}/{arrangement}", tokens)
    # One thing, whatever heads are in it: ranks of engines with equal tensor-parallel sizes match.
    alone = Range(sharding.rank, sharding.rank + 1)
    return Part("kv", alone, 0, extent, f"{packing}/{arrangement}{_rank_of(sharding)}", tokens)
