"""The bytes of paged tensors as arrays, as few as possible: those that lie alike at one distance are one array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from kvferry.protocol.geometry import PagedTensor


class CellStack(NamedTuple):
    """Paged tensors of one cache group in one allocation, alike but for where they begin.

    Attributes:
        tile_tokens: tokens per cell.
        cells: uint8 `[tensors, blocks, heads, tiles, elements, element_bytes]`, sharing the caches' memory.
    """

    group: int
    tile_tokens: int
    cells: torch.Tensor


def stack_cells(tensors: Iterable[PagedTensor], storages: Sequence[torch.Tensor]) -> list[CellStack]:
    """All cells of these tensors.

    Raises:
        ValueError: one of them lies in none of the storages.
    """
    alike: dict[tuple[int, ...], dict[int, PagedTensor]] = {}  # by base: torch writes no byte that is there twice
    for tensor in tensors:
        alike.setdefault((_storage_of(tensor, storages), *_geometry(tensor)), {})[tensor.base] = tensor
    return [
        _stack(storages[storage], run)
        for (storage, *_), members in alike.items()
        for run in _evenly_spaced([members[base] for base in sorted(members)])
    ]


def _storage_of(tensor: PagedTensor, storages: Sequence[torch.Tensor]) -> int:
    for index, storage in enumerate(storages):
        whole = storage.untyped_storage()
        if 0 <= tensor.base - whole.data_ptr() < whole.nbytes():
            return index
    raise ValueError(f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations")


def _geometry(tensor: PagedTensor) -> tuple[int, ...]:
    """Everything that says where a tensor's bytes are, but for its base."""
    return (
        tensor.group,
        tensor.blocks,
        tensor.block_stride,
        len(tensor.heads),
        tensor.head_stride,
        tensor.tiles,
        tensor.tile_tokens,
        tensor.tile_stride,
        tensor.cell_bytes,
        tensor.element_bytes,
        tensor.element_stride,
    )


def _evenly_spaced(tensors: Sequence[PagedTensor]) -> Iterator[list[PagedTensor]]:
    """Tensors in ascending order, divided into runs that follow each other at one distance."""
    run: list[PagedTensor] = []
    for tensor in tensors:
        if len(run) > 1 and tensor.base - run[-1].base != run[1].base - run[0].base:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _stack(storage: torch.Tensor, run: Sequence[PagedTensor]) -> CellStack:
    first = run[0]
    whole = storage.untyped_storage()
    element = first.element_bytes or first.cell_bytes
    distance = run[1].base - first.base if len(run) > 1 else 0
    shape = (len(run), first.blocks, len(first.heads), first.tiles, first.cell_bytes // element, element)
    strides = (distance, first.block_stride, first.head_stride, first.tile_stride, first.element_stride, 1)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(whole)
    return CellStack(first.group, first.tile_tokens, flat.as_strided(shape, strides, first.base - whole.data_ptr()))
