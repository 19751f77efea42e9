"""Runs of a block, against the address of every byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.runs import Run, cell_offsets, shared_runs
from kvferry.protocol.geometry import PagedTensor, Range
from tests.plan.samples import strides, tensor

HEADS, TILES, CELL = 3, 4, 8


def laid_out(order: str, heads: int = HEADS, tiles: int = TILES, cell: int = CELL) -> PagedTensor:
    head, tile = (tiles * cell, cell) if order == "HND" else (cell, heads * cell)
    block = heads * tiles * cell
    return tensor(
        heads=Range(0, heads),
        block_tokens=tiles,
        block_stride=block,
        head_stride=head,
        tile_stride=tile,
        cell_bytes=cell,
    )


def bytes_of(local: PagedTensor, remote: PagedTensor) -> dict[int, int]:
    """Offset in the local block → offset in the remote block, byte by byte, by the definition."""
    return {
        head * local.head_stride + tile * local.tile_stride + byte: head * remote.head_stride
        + tile * remote.tile_stride
        + byte
        for head in range(len(local.heads))
        for tile in range(local.tiles)
        for byte in range(local.cell_bytes)
    }


def check(local: PagedTensor, remote: PagedTensor) -> tuple[Run, ...]:
    runs = shared_runs(local, remote)
    moved = [(run.local_offset + byte, run.remote_offset + byte) for run in runs for byte in range(run.length)]
    assert len(moved) == local.block_bytes, "every byte once"
    assert dict(moved) == bytes_of(local, remote), "and from its own place"
    assert [run.local_offset for run in runs] == sorted(run.local_offset for run in runs)
    for one, following in itertools.pairwise(runs):
        meets_here = one.local_offset + one.length == following.local_offset
        meets_there = one.remote_offset + one.length == following.remote_offset
        assert not (meets_here and meets_there), "as few runs as both sides allow"
    return runs


@given(data=st.data())
def test_any_two_strides_give_every_byte_once_in_as_few_runs_as_possible(data: st.DataObject) -> None:
    heads, tiles = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    cell = data.draw(st.sampled_from((1, 2, 8)))
    sides = []
    for _ in range(2):
        block, head, tile = data.draw(strides((3, heads, tiles), cell))
        sides.append(
            tensor(
                heads=Range(0, heads),
                block_tokens=tiles,
                block_stride=block,
                head_stride=head,
                tile_stride=tile,
                cell_bytes=cell,
            )
        )
    check(*sides)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_equal_dense_blocks_are_one_run(order: str) -> None:
    assert check(laid_out(order), laid_out(order)) == (Run(0, 0, HEADS * TILES * CELL),)


@pytest.mark.parametrize(("here", "there"), [("HND", "NHD"), ("NHD", "HND")])
def test_heads_outermost_against_tokens_outermost_is_one_run_a_cell(here: str, there: str) -> None:
    runs = check(laid_out(here), laid_out(there))
    assert [run.length for run in runs] == [CELL] * (HEADS * TILES)


def test_one_head_lies_the_same_in_every_order() -> None:
    assert len(check(laid_out("HND", heads=1), laid_out("NHD", heads=1))) == 1


def test_a_gap_on_one_side_divides_the_run_on_both() -> None:
    gapped = tensor(block_stride=96, head_stride=48)
    assert check(tensor(), gapped) == (Run(0, 0, 32), Run(32, 48, 32))
    assert check(gapped, tensor()) == (Run(0, 0, 32), Run(48, 32, 32))


def test_the_worked_example_of_the_docstring() -> None:
    here = tensor(head_stride=32, tile_stride=8)
    assert check(here, here) == (Run(0, 0, 64),)
    tokens_outermost = tensor(head_stride=8, tile_stride=16)
    assert [run.length for run in check(here, tokens_outermost)] == [8] * 8


def test_cell_offsets_are_the_address_formula_without_the_block() -> None:
    offsets = cell_offsets(tensor(head_stride=1 << 40, tile_stride=100))
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [[0, 100, 200, 300], [(1 << 40) + n for n in (0, 100, 200, 300)]]
