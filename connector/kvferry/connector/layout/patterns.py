"""Patterns: hypotheses about the positions of the cells of K and V in a block, from a view's shape and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Cells:
    """The positions of the cells of one kind in a view, in elements.

    Element `i` of (block, head, token) is at
    `offset + block·view.stride(0) + head·head_stride + token·token_stride + i·element_stride`.
    """

    kind: str
    heads: int
    elements: int
    offset: int
    head_stride: int
    token_stride: int
    element_stride: int = 1

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """These cells of a view as `[B, heads, N, elements]`."""
        shape = (view.shape[0], self.heads, view.shape[2], self.elements)
        strides = (view.stride(0), self.head_stride, self.token_stride, self.element_stride)
        return view.as_strided(shape, strides, view.storage_offset() + self.offset)


def is_mla(spec: Any) -> bool:
    """Whether a cache holds one latent vector per token, the same on every tensor-parallel rank."""
    return type(spec).__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec")


def is_indexer(spec: Any) -> bool:
    """Whether a cache holds the keys by which sparse attention selects its tokens."""
    return str(getattr(getattr(spec, "cache_role", None), "value", "")) == "indexer"


def _rows(view: torch.Tensor, spec: Any) -> tuple[Cells, ...]:
    """A row `[k | v]` for every (head, token), with any strides of heads and tokens: the usual one on GPUs."""
    width, width_v = spec.head_size, spec.head_size_v
    if is_mla(spec) or view.shape[1] != spec.num_kv_heads or view.shape[3] != width + width_v:
        return ()
    strides = (view.stride(1), view.stride(2))
    return (
        Cells("k", spec.num_kv_heads, width, 0, *strides),
        Cells("v", spec.num_kv_heads, width_v, width, *strides),
    )


def _columns(view: torch.Tensor, spec: Any) -> tuple[Cells, ...]:
    """K as `[D, N]`, then V as `[N, D]`, for every (block, head): CPU attention on most instruction sets."""
    width, tokens = spec.head_size, view.shape[2]
    if not _rows(view, spec) or spec.head_size_v != width or view.stride(2) != view.shape[3]:
        return ()
    return (
        Cells("k", spec.num_kv_heads, width, 0, view.stride(1), 1, tokens),
        Cells("v", spec.num_kv_heads, width, tokens * width, view.stride(1), width),
    )


def _planes(view: torch.Tensor, spec: Any) -> tuple[Cells, ...]:
    """The head axis has two entries, one for K and one for V; all heads of a token are one row."""
    heads, width = spec.num_kv_heads, spec.head_size
    if (
        is_mla(spec)
        or view.shape[1] != 2
        or view.shape[3] != heads * width
        or spec.head_size_v != width
    ):
        return ()
    return (
        Cells("k", heads, width, 0, width, view.stride(2)),
        Cells("v", heads, width, view.stride(1), width, view.stride(2)),
    )


def _latent(view: torch.Tensor, spec: Any) -> tuple[Cells, ...]:
    """MLA: a row `[latent | rope]` for every token."""
    if (
        not is_mla(spec)
        or is_indexer(spec)
        or view.shape[1] != 1
        or view.shape[3] != spec.head_size
    ):
        return ()
    return (Cells("mla", 1, spec.head_size, 0, 0, view.stride(2)),)


PATTERNS: dict[str, Callable[[torch.Tensor, Any], tuple[Cells, ...]]] = {
    "rows": _rows,
    "columns": _columns,
    "planes": _planes,
    "latent": _latent,
}
"""By name, a function from a view `[B, H, N, C]` and its spec to the cells; () if the shape excludes the pattern."""
