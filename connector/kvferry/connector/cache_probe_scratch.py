"""Memory in which a backend may write as if it were a layer's cache."""

from __future__ import annotations

import torch

BLOCKS = 3
"""As many blocks as are needed to write one whole, one in part and one not at all."""

_GUARD_BYTES = 4096
_MAX_BYTES = 64 << 20
"""Above this the gaps between blocks and between heads are made smaller than in the layer's cache."""


class Scratch:
    """A cache of `BLOCKS` blocks with the shape and the strides of a layer's, between guard bytes.

    Args:
        view: the layer's, `[B, H, N, C]`.
    """

    def __init__(self, view: torch.Tensor) -> None:
        item = view.element_size()
        shape = (BLOCKS, *view.shape[1:])
        strides = _strides(view, shape)
        size = _extent(shape, strides) * item + 2 * _GUARD_BYTES
        self.raw = torch.empty(size, dtype=torch.uint8, device=view.device)
        self._shape, self._strides = shape, strides
        self.view = self.as_view(self.raw, view.dtype)

    def image(self, fill: int) -> torch.Tensor:
        """What all of the memory would hold, filled with one byte."""
        return torch.full_like(self.raw, fill)

    def as_view(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The cache in an image of this memory, in elements of a type of the same size."""
        elements = raw.view(dtype)
        return elements.as_strided(self._shape, self._strides, _GUARD_BYTES // elements.element_size())


def _strides(view: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The view's own strides if that is affordable; else in the same order, with gaps where it has gaps."""
    strides = list(view.stride())
    if _extent(shape, strides) * view.element_size() <= _MAX_BYTES:
        return tuple(strides)
    dense_there = dense_here = 1
    for axis in sorted((axis for axis in range(4) if view.shape[axis] > 1), key=view.stride().__getitem__):
        has_gap = view.stride(axis) > dense_there
        strides[axis] = dense_here * (2 if has_gap else 1)
        dense_there, dense_here = view.stride(axis) * view.shape[axis], strides[axis] * shape[axis]
    return tuple(strides)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...] | list[int]) -> int:
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
