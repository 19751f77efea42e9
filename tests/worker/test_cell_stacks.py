"""Tensors of one geometry at equal distances are one array; with any layout, every cell is in one array once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.worker.loads.tail_zeroing import stack_cells
from tests.harness.caches import CacheShape, ToyCaches

BLOCKS, HEADS, TILES, CELL = 3, 2, 4, 8
SPAN = BLOCKS * HEADS * TILES * CELL


def tensor_at(base: int, number: int, group: int = 0) -> PagedTensor:
    return PagedTensor(
        layer=f"layers.{number}",
        kind="k",
        group=group,
        base=base,
        blocks=BLOCKS,
        block_tokens=TILES,
        block_stride=HEADS * TILES * CELL,
        heads=Range(0, HEADS),
        head_stride=TILES * CELL,
        tile_tokens=1,
        tile_stride=CELL,
        cell_bytes=CELL,
        format=Format(dtype="uint8"),
    )


@given(
    offsets=st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True),
    groups=st.lists(st.integers(0, 1), min_size=8, max_size=8),
)
def test_every_cell_of_every_tensor_is_in_one_stack(offsets: list[int], groups: list[int]) -> None:
    memory = np.zeros(13 * SPAN, dtype=np.uint8)
    storage = torch.from_numpy(memory)
    tensors = [
        tensor_at(storage.data_ptr() + offset * SPAN, number, groups[number]) for number, offset in enumerate(offsets)
    ]
    stacks = stack_cells(tensors, (storage,))
    for stack in stacks:
        stack.cells.numpy()[...] += 1 + stack.group  # a cell that is there twice would show
    expected = np.zeros_like(memory)
    for number, offset in enumerate(offsets):
        expected[offset * SPAN : (offset + 1) * SPAN] = 1 + groups[number]
    np.testing.assert_array_equal(memory, expected)
    assert sum(len(stack.cells) for stack in stacks) == len(tensors)


def test_tensors_that_are_the_same_bytes_are_there_once_and_can_be_written() -> None:
    storage = torch.ones(2 * SPAN, dtype=torch.uint8)
    stacks = stack_cells(
        [tensor_at(storage.data_ptr() + place * SPAN, n) for n, place in enumerate((0, 0, 1))], [storage]
    )
    for stack in stacks:
        stack.cells[:, 1] = 0
    assert [len(stack.cells) for stack in stacks] == [2]
    assert int(storage.sum()) == 2 * SPAN * (BLOCKS - 1) // BLOCKS


@pytest.mark.parametrize(
    ("places", "sizes"), [((0, 1, 2, 3, 4, 5), [6]), ((0, 1, 2, 4, 6), [3, 2])], ids=["even distances", "an uneven one"]
)
def test_tensors_at_equal_distances_of_one_allocation_are_one_stack(places: tuple[int, ...], sizes: list[int]) -> None:
    storage = torch.zeros(7 * SPAN, dtype=torch.uint8)
    stacks = stack_cells([tensor_at(storage.data_ptr() + place * SPAN, place) for place in places], (storage,))
    assert [stack.cells.shape for stack in stacks] == [(size, BLOCKS, HEADS, TILES, 1, CELL) for size in sizes]


def test_tensors_of_other_allocations_are_not_stacked() -> None:
    caches = ToyCaches(CacheShape(layers=3), poison=0)
    assert len(stack_cells(caches.kv.tensors, caches.kv.storages)) == 3
