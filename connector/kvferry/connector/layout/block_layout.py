"""Block layouts: where a backend keeps what in the bytes of a cache block, and the paged tensors that describe it.

Strides alone do not give the meaning of the bytes. A *pattern* is a hypothesis about it: the positions of the cells of
K and V, computed from a view's shape and strides. `probe` tests every pattern against the bytes that the backend really
writes, and the matching one describes the layer. If none matches, a head of a block or a whole block is one opaque
cell, in a format that no other block layout has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.connector.layout.patterns import PATTERNS, CellLayout, is_indexer, is_mla
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """What a block layout decides of a `PagedTensor`; `offset` is in bytes from the layer's first byte."""

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

    def paged_tensor(
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
            format=Format(
                dtype=self.dtype, quantization=quantization, packing=self.packing
            ),
        )


def packing_of(layer: Any) -> str:
    """The packing of a layer's blocks: the backend's name and everything that its block layout depends on."""
    name = type(layer).__name__
    if hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
        if backend is not None:
            name = str(backend.get_name())
    packing = name.lower()
    if name == "CPU_ATTN":
        # The CPU backend packs K for the instruction set, so engines on different machines may differ.
        packing = f"cpu_attn/{cpu_attention_isa(layer)}"
    return packing + _float8_suffix(layer)


def _float8_suffix(layer: Any) -> str:
    """The float8 format of a layer's cache, as a suffix of its packing; "" for other dtypes."""
    # vLLM keeps every float8 format in a cache of bytes, under one quantisation mode: only this attribute tells them
    # apart.
    cache_dtype = str(getattr(layer, "kv_cache_dtype", None))
    if not cache_dtype.startswith("fp8"):
        return ""
    if cache_dtype == "fp8":
        return "/fp8_e4m3"
    return f"/{cache_dtype}"


def tensor_layouts(
    layer: str,
    view: torch.Tensor,
    spec: Any,
    block_layout: BlockLayout,
    sharding: Sharding,
) -> tuple[TensorLayout, ...]:
    """The paged tensors of a layer's cache.

    Args:
        view: `[B, H, N, C]`, content contiguous.

    Raises:
        InvalidConfig: the bytes of an opaque block are not contiguous.
    """
    cells: tuple[CellLayout, ...] = ()
    pattern = PATTERNS.get(block_layout.pattern)
    if pattern is not None:
        cells = pattern(view, spec)
    if cells:
        is_replicated = is_mla(spec)
        return tuple(
            _by_token(
                kind_cells, view, block_layout, sharding, is_replicated=is_replicated
            )
            for kind_cells in cells
        )
    if block_layout.pattern == BY_HEAD and heads_lie_together(view, spec):
        return (_by_head(view, block_layout, sharding),)
    return (_by_block(layer, view, spec, block_layout, sharding),)


def heads_lie_together(view: torch.Tensor, spec: Any) -> bool:
    """Whether the bytes of each (block, head) are contiguous."""
    if is_mla(spec) or view.shape[1] != spec.num_kv_heads:
        return False
    return bool(view.stride(2) == view.shape[3])


def _by_token(
    cells: CellLayout,
    view: torch.Tensor,
    block_layout: BlockLayout,
    sharding: Sharding,
    *,
    is_replicated: bool,
) -> TensorLayout:
    """The cells of one kind, one for every (head, token)."""
    if is_replicated:
        held = Range(0, 1)
        suffix = ""
    else:
        held, suffix = _held_heads(sharding, cells.heads)
    item = view.element_size()
    head_stride = 0
    if cells.heads > 1:
        head_stride = cells.head_stride * item
    # 0 for elements that lie together, which is nearly every cache: the cell is one run.
    element_bytes = 0
    element_stride = 0
    if cells.element_stride != 1:
        element_bytes = item
        element_stride = cells.element_stride * item
    return TensorLayout(
        kind=cells.kind,
        heads=held,
        head_stride=head_stride,
        cell_bytes=cells.elements * item,
        dtype=block_layout.dtype_of(view),
        packing=PLAIN + suffix,
        tile_stride=cells.token_stride * item,
        offset=cells.offset * item,
        element_bytes=element_bytes,
        element_stride=element_stride,
        scales=block_layout.scales.get(cells.kind, ()),
    )


def _by_head(
    view: torch.Tensor, block_layout: BlockLayout, sharding: Sharding
) -> TensorLayout:
    """K and V of a (block, head) as one cell."""
    _, heads, tokens, content = (int(n) for n in view.shape)
    item = view.element_size()
    held, suffix = _held_heads(sharding, heads)
    head_stride = 0
    if heads > 1:
        head_stride = view.stride(1) * item
    return TensorLayout(
        kind="kv",
        heads=held,
        head_stride=head_stride,
        cell_bytes=tokens * content * item,
        dtype=block_layout.dtype_of(view),
        packing=_opaque_packing(block_layout) + suffix,
        tile_tokens=tokens,
    )


def _held_heads(sharding: Sharding, local_heads: int) -> tuple[Range, str]:
    """The global heads that this rank holds, and a suffix of the packing."""
    held = sharding.heads(local_heads)
    if held is not None:
        return held, ""
    # Unknown heads: with the size in the packing, only engines with equal tensor-parallel sizes match. Between them
    # equal ranks hold equal heads, whatever these are.
    first_head = sharding.rank * local_heads
    return Range(first_head, first_head + local_heads), _size_suffix(sharding)


def _size_suffix(sharding: Sharding) -> str:
    return f"/tp{sharding.size}" if sharding.size > 1 else ""


def _opaque_packing(block_layout: BlockLayout) -> str:
    """The packing of opaque cells."""
    parts = [block_layout.packing]
    # Scales are part of it, because opaque cells can only be copied unchanged.
    for kind, scales in sorted(block_layout.scales.items()):
        if set(scales) != {1.0}:
            numbers = ",".join(format(scale, ".9g") for scale in scales)
            parts.append(f"{kind}={numbers}")
    return "/".join(parts)


def _by_block(
    layer: str,
    view: torch.Tensor,
    spec: Any,
    block_layout: BlockLayout,
    sharding: Sharding,
) -> TensorLayout:
    """All local heads of a block as one cell.

    Raises:
        InvalidConfig: the bytes of a block are not contiguous.
    """
    item = view.element_size()
    shape = tuple(int(n) for n in view.shape[1:])
    strides = tuple(int(n) * item for n in view.stride()[1:])
    heads, tokens, content = shape
    extent = item + sum(
        (n - 1) * stride for n, stride in zip(shape, strides, strict=True)
    )
    if extent != heads * tokens * content * item:
        raise InvalidConfig(
            f"cache of layer {layer}",
            f"strides {list(strides)} for {list(shape)}",
            "blocks whose bytes are contiguous (set VLLM_KV_CACHE_LAYOUT to LBHNC)",
        )
    dtype = block_layout.dtype_of(view)
    packing = f"{_opaque_packing(block_layout)}/{_axis_order(shape, strides)}"
    if heads == 1 and is_mla(spec):
        return TensorLayout(
            kind="indexer" if is_indexer(spec) else "kv",
            heads=Range(0, 1),
            head_stride=0,
            cell_bytes=extent,
            dtype=dtype,
            packing=packing,
            tile_tokens=tokens,
        )
    # One unit, whatever its heads are: only ranks of engines with equal tensor-parallel sizes match.
    return TensorLayout(
        kind="kv",
        heads=Range(sharding.rank, sharding.rank + 1),
        head_stride=0,
        cell_bytes=extent,
        dtype=dtype,
        packing=packing + _size_suffix(sharding),
        tile_tokens=tokens,
    )


def _axis_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """The axes of a block and their sizes, from the outermost to the innermost, e.g. `heads2.tokens16.content512`.

    It is part of the packing, because blocks of equal size may differ in layout.
    """
    axes = []
    for name, size, stride in zip(
        ("heads", "tokens", "content"), shape, strides, strict=True
    ):
        if size > 1:
            axes.append((stride, f"{name}{size}"))
    axes.sort(reverse=True)
    return ".".join(name for _, name in axes) or "one"
