"""Patterns: hypotheses about the positions of the cells of K and V in a block, from a view's shape and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class CellLayout:
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

    def select(self, view: torch.Tensor) -> torch.Tensor:
        """These cells of a view, as `[B, heads, N, elements]` of the same memory."""
        shape = (
            view.shape[0],
            self.heads,
            view.shape[2],
            self.elements,
        )
        strides = (
            view.stride(0),
            self.head_stride,
            self.token_stride,
            self.element_stride,
        )
        return view.as_strided(shape, strides, view.storage_offset() + self.offset)


def is_mla(spec: Any) -> bool:
    """Whether a cache holds one latent vector per token, the same on every tensor-parallel rank."""
    # By name, so that this module does not import vLLM.
    return type(spec).__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec")


def is_indexer(spec: Any) -> bool:
    """Whether a cache holds the keys by which sparse attention selects its tokens."""
    role = getattr(spec, "cache_role", None)
    return str(getattr(role, "value", "")) == "indexer"


def _rows(view: torch.Tensor, spec: Any) -> tuple[CellLayout, ...]:
    """A row `[k | v]` for every (head, token), with any strides of heads and tokens: the usual one on GPUs."""
    heads = spec.num_kv_heads
    width_k = spec.head_size
    width_v = spec.head_size_v
    if is_mla(spec) or view.shape[1] != heads or view.shape[3] != width_k + width_v:
        return ()
    k = CellLayout(
        kind="k",
        heads=heads,
        elements=width_k,
        offset=0,
        head_stride=view.stride(1),
        token_stride=view.stride(2),
    )
    v = replace(k, kind="v", elements=width_v, offset=width_k)
    return (k, v)


def _columns(view: torch.Tensor, spec: Any) -> tuple[CellLayout, ...]:
    """K as `[D, N]`, then V as `[N, D]`, for every (block, head): CPU attention on most instruction sets."""
    if not _rows(view, spec):
        return ()
    width = spec.head_size
    tokens = view.shape[2]
    if spec.head_size_v != width or view.stride(2) != view.shape[3]:
        return ()
    k = CellLayout(
        kind="k",
        heads=spec.num_kv_heads,
        elements=width,
        offset=0,
        head_stride=view.stride(1),
        token_stride=1,
        element_stride=tokens,
    )
    v = replace(
        k, kind="v", offset=tokens * width, token_stride=width, element_stride=1
    )
    return (k, v)


def _planes(view: torch.Tensor, spec: Any) -> tuple[CellLayout, ...]:
    """The head axis has two entries, one for K and one for V; all heads of a token are one row."""
    if is_mla(spec):
        return ()
    heads = spec.num_kv_heads
    width = spec.head_size
    if (
        view.shape[1] != 2
        or view.shape[3] != heads * width
        or spec.head_size_v != width
    ):
        return ()
    k = CellLayout(
        kind="k",
        heads=heads,
        elements=width,
        offset=0,
        head_stride=width,
        token_stride=view.stride(2),
    )
    v = replace(k, kind="v", offset=view.stride(1))
    return (k, v)


def _latent(view: torch.Tensor, spec: Any) -> tuple[CellLayout, ...]:
    """MLA: a row `[latent | rope]` for every token."""
    if not is_mla(spec) or is_indexer(spec):
        return ()
    if view.shape[1] != 1 or view.shape[3] != spec.head_size:
        return ()
    latent = CellLayout(
        kind="mla",
        heads=1,
        elements=spec.head_size,
        offset=0,
        head_stride=0,
        token_stride=view.stride(2),
    )
    return (latent,)


PATTERNS: dict[str, Callable[[torch.Tensor, Any], tuple[CellLayout, ...]]] = {
    "rows": _rows,
    "columns": _columns,
    "planes": _planes,
    "latent": _latent,
}
"""By name, a function from a view `[B, H, N, C]` and its spec to the cells; () if the shape excludes the pattern."""
