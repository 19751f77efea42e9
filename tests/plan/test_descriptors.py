"""Descriptors, expanded as NIXL expands them, against the address of every byte."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.descriptors import (
    BlockPairs,
    DescriptorPairs,
    DescriptorTable,
    descriptor_pairs,
    descriptor_table,
    expand_blocks,
)
from kvferry.plan.runs import shared_runs
from kvferry.plan.transfer_plan import Route, Slice
from kvferry.protocol.geometry import PagedTensor, Place, Range
from tests.plan.samples import cell_address, span, strides, tensor


def expand(rows: np.ndarray) -> list[tuple[int, int]]:
    """`(address, length)` of every descriptor, in NIXL's order: row by row, block by block."""
    return [(a + block * stride, n) for a, n, _, stride, count in rows.tolist() for block in range(count)]


def bytes_moved(table: DescriptorTable, wanted: DescriptorPairs) -> list[tuple[int, int]]:
    """`(local address, remote address)` of every byte that a read of these pairs moves."""
    here, there = expand(table.local_rows), expand(table.remote_rows)
    moved = []
    for left, right in zip(wanted.local.tolist(), wanted.remote.tolist(), strict=True):
        (to, length), (source, same) = here[left], there[right]
        assert length == same
        moved += [(to + byte, source + byte) for byte in range(length)]
    return moved


def route_of(pairs: list[tuple[PagedTensor, PagedTensor]]) -> Route:
    slices = tuple(Slice(local, remote, local.heads, shared_runs(local, remote)) for local, remote in pairs)
    return Route(0, Place(), slices, expected=1)


def wanted_bytes(pairs: list[tuple[PagedTensor, PagedTensor]], blocks: dict[int, BlockPairs]) -> dict[int, int]:
    wanted = {}
    for local, remote in pairs:
        for here, there in zip(*_ids(blocks.get(local.group)), strict=True):
            for head in range(len(local.heads)):
                for tile in range(local.tiles):
                    to, source = cell_address(local, here, head, tile), cell_address(remote, there, head, tile)
                    wanted.update({to + byte: source + byte for byte in range(local.cell_bytes)})
    return wanted


def _ids(blocks: BlockPairs | None) -> tuple[list[int], list[int]]:
    return (blocks.local.tolist(), blocks.remote.tolist()) if blocks is not None else ([], [])


@st.composite
def both_sides(draw: st.DrawFn) -> list[tuple[PagedTensor, PagedTensor]]:
    """Up to three tensors in up to two groups, each side with its own strides, block count and place in memory."""
    pairs = []
    bases = [4096, 1 << 40]
    for layer in range(draw(st.integers(1, 3))):
        heads, tiles, cell = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 4)))
        group = draw(st.integers(0, 1))
        sides = []
        for side in range(2):
            blocks = draw(st.integers(1, 5))
            block, head, tile = draw(strides((blocks, heads, tiles), cell, gaps=(0, 0, 3)))
            one = tensor(
                layer=f"layers.{layer}",
                group=group,
                base=bases[side],
                blocks=blocks,
                block_tokens=tiles,
                block_stride=block,
                heads=Range(2, 2 + heads),
                head_stride=head,
                tile_stride=tile,
                cell_bytes=cell,
            )
            bases[side] += span(one)
            sides.append(one)
        pairs.append((sides[0], sides[1]))
    return pairs


@st.composite
def block_pairs(draw: st.DrawFn, pairs: list[tuple[PagedTensor, PagedTensor]]) -> dict[int, BlockPairs]:
    chosen = {}
    for group in {local.group for local, _ in pairs}:
        if draw(st.booleans()) or len(pairs) == 1:
            here = min(local.blocks for local, _ in pairs if local.group == group)
            there = min(remote.blocks for local, remote in pairs if local.group == group)
            local = draw(st.lists(st.integers(0, here - 1), unique=True, max_size=here))
            remote = [draw(st.integers(0, there - 1)) for _ in local]
            chosen[group] = BlockPairs(np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64))
    return chosen


@given(data=st.data())
@settings(max_examples=100)
def test_every_wanted_byte_is_read_once_from_its_place_and_nothing_else_is(data: st.DataObject) -> None:
    pairs = data.draw(both_sides())
    blocks = data.draw(block_pairs(pairs))
    table = descriptor_table(route_of(pairs), 0, 0)
    wanted = descriptor_pairs(table, blocks)
    moved = bytes_moved(table, wanted)
    assert not [address for address, times in Counter(to for to, _ in moved).items() if times > 1]
    assert dict(moved) == wanted_bytes(pairs, blocks)
    assert wanted.num_bytes == len(moved)
    assert {str(wanted.local.dtype), str(wanted.remote.dtype)} == {"int32"}


@given(data=st.data())
@settings(max_examples=100)
def test_within_a_row_the_remote_indices_ascend_so_that_nixl_can_merge(data: st.DataObject) -> None:
    pairs = data.draw(both_sides())
    table = descriptor_table(route_of(pairs), 0, 0)
    wanted = descriptor_pairs(table, data.draw(block_pairs(pairs)))
    rows = np.searchsorted(table.remote_starts, wanted.remote, side="right")
    same_row = np.diff(rows) == 0
    assert (np.diff(wanted.remote)[same_row] >= 0).all()
    changes = np.count_nonzero(np.diff(rows)) + bool(len(rows))
    assert changes == len(np.unique(rows)), "tensor-major: no row is left and entered again"


def test_neighbours_on_both_sides_come_out_as_neighbours_whatever_order_they_came_in() -> None:
    table = descriptor_table(route_of([(tensor(), tensor(base=1 << 30))]), 0, 0)
    pairs = BlockPairs(np.array([5, 3, 4]), np.array([2, 0, 1]))
    wanted = descriptor_pairs(table, {0: pairs})
    assert (wanted.local.tolist(), wanted.remote.tolist()) == ([3, 4, 5], [0, 1, 2])


def test_rows_are_address_length_device_stride_and_count_of_each_run() -> None:
    local, remote = tensor(blocks=8), tensor(base=1 << 30, blocks=3, block_stride=128, head_stride=40)
    table = descriptor_table(route_of([(local, remote)]), local_device=2, remote_device=5)
    assert table.local_rows.tolist() == [[4096, 32, 2, 64, 8], [4128, 32, 2, 64, 8]]
    assert table.remote_rows.tolist() == [[1 << 30, 32, 5, 128, 3], [(1 << 30) + 40, 32, 5, 128, 3]]
    assert (table.local_starts.tolist(), table.remote_starts.tolist()) == ([0, 8], [0, 3])
    assert table.lengths.tolist() == [32, 32]
    assert table.local_rows.dtype == np.int64


def test_a_table_grows_with_tensors_and_runs_but_not_with_blocks() -> None:
    few = descriptor_table(route_of([(tensor(blocks=1), tensor(blocks=1))]), 0, 0)
    many = descriptor_table(route_of([(tensor(blocks=1 << 20), tensor(blocks=1 << 20))]), 0, 0)
    assert few.local_rows.shape == many.local_rows.shape == (1, 5)


def test_a_request_without_blocks_reads_nothing() -> None:
    table = descriptor_table(route_of([(tensor(), tensor())]), 0, 0)
    for nothing in ({}, {1: BlockPairs(np.array([1]), np.array([1]))}, {0: BlockPairs(np.array([]), np.array([]))}):
        wanted = descriptor_pairs(table, nothing)
        assert (len(wanted.local), len(wanted.remote), wanted.num_bytes) == (0, 0, 0)


def test_a_route_that_only_releases_has_an_empty_table() -> None:
    table = descriptor_table(route_of([]), 0, 0)
    assert (table.local_rows.shape, table.remote_rows.shape, dict(table.group_rows)) == ((0, 5), (0, 5), {})


@given(st.lists(st.integers(0, 2**31 - 1), max_size=6), st.integers(1, 8))
def test_a_scheduler_block_is_so_many_kernel_blocks_in_a_row(blocks: list[int], ratio: int) -> None:
    expected = [block * ratio + part for block in blocks for part in range(ratio)]
    assert expand_blocks(blocks, ratio).tolist() == expected


def test_the_worked_example_of_expand_blocks() -> None:
    assert expand_blocks([7, 2], 2).tolist() == [14, 15, 4, 5]
