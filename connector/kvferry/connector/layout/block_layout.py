"""Block layouts: the block layout of the bytes of a cache block, as a backend's paged tensors.

Strides alone do not give the meaning of the bytes. A *pattern* is a hypothesis about it: the positions of the cells of
K and V, computed from a view's shape and strides. `probe` tests every pattern against the bytes that the backend really
writes, and the matching one describes the layer. If none matches, a head of a block or a whole block is one opaque
cell, in a format that no other block layout has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.connector.layout.patterns import PATTERNS, Cells, is_indexer, is_mla
from kvferry.connector.layout.sharding import Sharding
from kvferry.connector.vllm.attention import cpu_attention_isa
from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import Format, Interleave, PagedTensor, Range

PLAIN = "plain"
"""The packing of cells that are fully described by their strides."""

BY_HEAD = "by_head"
"""Instead of a pattern: each (block, head) has its own bytes, and their layout is the same for all of them."""

OPAQUE = ""
"""Instead of a pattern: the layout of a block is unknown."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The block layout of a layer's cache, as far as it is known.

    Attributes:
        packing: the backend and everything that its layout depends on, see `packing_of`.
        pattern: one of `patterns.PATTERNS`, or `BY_HEAD`, or `OPAQUE`.
        dtype: dtype of the elements; empty if it is the view's (not for float8 in a cache of bytes).
        scales: static scales by kind, `value = stored · scale`: one for all heads of this worker or one for each.
    """

    packing: str
    pattern: str = OPAQUE
    dtype: str = ""
    scales: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def dtype_of(self, view: torch.Tensor) -> str:
        """The dtype of the elements of a cache with this layout."""
        return self.dtype or str(view.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a `PagedTensor` that a block layout decides; `offset` is in bytes from the layer's first byte."""

    kind: str
    heads: Range
    head_stride: int
    cell_bytes: int
    dtype: str
    packing: str = PLAIN
    tile_tokens: int = 1
    tile_stride: int = 0
    offset: int = 0
    element_bytes: int = 0
    element_stride: int = 0
    scales: tuple[float, ...] = ()

    def tensor(
        self,
        layer: str,
        group: int,
        view: torch.Tensor,
        block_tokens: int,
        *,
        interleave: Interleave | None = None,
        quantization: str = "none",
    ) -> PagedTensor:
        """The paged tensor of a view whose first axis is blocks."""
        return PagedTensor(
            layer=layer,
            kind=self.kind,
            group=group,
            base=view.data_ptr() + self.offset,
            blocks=view.shape[0],
            block_tokens=block_tokens,
            block_stride=view.stride(0) * view.element_size(),
            heads=self.heads,
            head_stride=self.head_stride,
            tile_tokens=self.tile_tokens,
            tile_stride=self.tile_stride,
            cell_bytes=self.cell_bytes,
            element_bytes=self.element_bytes,
            element_stride=self.element_stride,
            interleave=interleave or Interleave(),
            scales=self.scales,
            format=Format(dtype=self.dtype, quantization=quantization, packing=self.packing),
        )


def packing_of(layer: Any, layer_name: str) -> str:
    """The packing of a layer's blocks: the backend's name and everything that its block layout depends on.

    For float8 that includes the format: vLLM keeps every format in a cache of bytes, under one quantisation mode.
    """
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    name = str(backend.get_name()) if backend is not None else type(layer).__name__
    stored = _float8_of(layer)
    if name != "CPU_ATTN":
        return name.lower() + stored
    return f"cpu_attn/{cpu_attention_isa(layer)}{stored}"


def _float8_of(layer: Any) -> str:
    """The float8 format of a layer's cache, as a suffix; "" for other dtypes. vLLM's `fp8` is its `fp8_e4m3`."""
    cache_dtype = str(getattr(layer, "kv_cache_dtype", None))
    if not cache_dtype.startswith("fp8"):
        return ""
    return "/fp8_e4m3" if cache_dtype == "fp8" else f"/{cache_dtype}"


def parts_of(
    layer: str, view: torch.Tensor, spec: Any, block_layout: BlockLayout, sharding: Sharding
) -> tuple[Part, ...]:
    """The paged tensors of a layer's cache.

    Args:
        view: `[B, H, N, C]`, content contiguous.

    Raises:
        InvalidConfig: the bytes of an opaque block are not contiguous.
    """
    pattern = PATTERNS.get(block_layout.pattern)
    cells = pattern(view, spec) if pattern is not None else ()
    if cells:
        return tuple(
            _part(one, view, block_layout, sharding, is_replicated=is_mla(spec)) for one in cells
        )
    if block_layout.pattern == BY_HEAD and heads_lie_together(view, spec):
        return (_head_of_block(view, block_layout, sharding),)
    return (_opaque_block(layer, view, spec, block_layout, sharding),)


def heads_lie_together(view: torch.Tensor, spec: Any) -> bool:
    """Whether the bytes of each (block, head) are contiguous."""
    return (
        not is_mla(spec)
        and view.shape[1] == spec.num_kv_heads
        and bool(view.stride(2) == view.shape[3])
    )


def _part(
    cells: Cells,
    view: torch.Tensor,
    block_layout: BlockLayout,
    sharding: Sharding,
    *,
    is_replicated: bool,
) -> Part:
    item = view.element_size()
    held, suffix = (Range(0, 1), "") if is_replicated else _heads(sharding, cells.heads)
    apart = cells.element_stride != 1
    return Part(
        kind=cells.kind,
        heads=held,
        head_stride=cells.head_stride * item if cells.heads > 1 else 0,
        cell_bytes=cells.elements * item,
        dtype=block_layout.dtype_of(view),
        packing=PLAIN + suffix,
        tile_stride=cells.token_stride * item,
        offset=cells.offset * item,
        element_bytes=item if apart else 0,
        element_stride=cells.element_stride * item if apart else 0,
        scales=block_layout.scales.get(cells.kind, ()),
    )


def _head_of_block(view: torch.Tensor, block_layout: BlockLayout, sharding: Sharding) -> Part:
    """K and V of a (block, head) as one cell."""
    _, heads, tokens, content = (int(n) for n in view.shape)
    item = view.element_size()
    held, suffix = _heads(sharding, heads)
    stride = view.stride(1) * item if heads > 1 else 0
    packing = _opaque(block_layout) + suffix
    return Part(
        "kv", held, stride, tokens * content * item, block_layout.dtype_of(view), packing, tokens
    )


def _heads(sharding: Sharding, local_heads: int) -> tuple[Range, str]:
    """The heads, and a suffix of the format. If the heads are unknown, only equal tensor-parallel sizes match."""
    known = sharding.heads(local_heads)
    if known is not None:
        return known, ""
    return Range(sharding.rank * local_heads, (sharding.rank + 1) * local_heads), _rank_of(sharding)


def _rank_of(sharding: Sharding) -> str:
    return f"/tp{sharding.size}" if sharding.size > 1 else ""


def _opaque(block_layout: BlockLayout) -> str:
    """The packing of opaque cells. Scales are part of it, because the cells can only be copied unchanged."""
    reported = [
        f"{kind}={','.join(format(scale, '.9g') for scale in scales)}"
        for kind, scales in sorted(block_layout.scales.items())
        if set(scales) != {1.0}
    ]
    return "/".join([block_layout.packing, *reported])


def _opaque_block(
    layer: str, view: torch.Tensor, spec: Any, block_layout: BlockLayout, sharding: Sharding
) -> Part:
    """All local heads of a block as one cell. The format has its axes and their sizes, from the outermost to the
    innermost, e.g. `heads2.tokens16.content512`, because blocks of equal size may differ in layout."""
    item = view.element_size()
    heads, tokens, content = shape = tuple(int(n) for n in view.shape[1:])
    strides = tuple(int(n) * item for n in view.stride()[1:])
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + item
    if extent != heads * tokens * content * item:
        raise InvalidConfig(
            f"cache of layer {layer}",
            f"strides {list(strides)} for {list(shape)}",
            "blocks whose bytes are contiguous (set VLLM_KV_CACHE_LAYOUT to LBHNC)",
        )
    axes = zip(
        strides, (f"heads{heads}", f"tokens{tokens}", f"content{content}"), shape, strict=True
    )
    order = ".".join(name for _, name, n in sorted(axes, reverse=True) if n > 1) or "one"
    packing, dtype = f"{_opaque(block_layout)}/{order}", block_layout.dtype_of(view)
    if heads == 1 and is_mla(spec):
        return Part(
            "indexer" if is_indexer(spec) else "kv", Range(0, 1), 0, extent, dtype, packing, tokens
        )
    # One unit, whatever its heads are: only ranks of engines with equal tensor-parallel sizes match.
    alone = Range(sharding.rank, sharding.rank + 1)
    return Part("kv", alone, 0, extent, dtype, packing + _rank_of(sharding), tokens)
