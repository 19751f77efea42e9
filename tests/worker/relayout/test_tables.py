"""Shapes with the fewest axes; tables: contradictory ones are refused, compiled ones describe the same copies."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bench.relayout_waves import moved_bytes
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.conversion import ITEM_BYTES
from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.relayout.device_table import (
    MAX_CHUNKS,
    DevicePieces,
    DeviceTable,
    divisor,
)
from kvferry.worker.relayout.port import Bounds, Memory
from kvferry.worker.relayout.shape import (
    CopyAxis,
    ElementConversion,
    ElementType,
    Shape,
)
from kvferry.worker.relayout.wave_table import InvalidTable, Pieces, WaveTable
from tests.worker.relayout import definitions
from tests.worker.relayout.cases import laid_out, plain, random_bytes, random_case

TO_FLOAT8 = ElementConversion(ElementType.BFLOAT16, ElementType.FLOAT8_E4M3)


def test_the_example_of_the_docstring() -> None:
    shape = Shape.from_axes(
        [CopyAxis(2, 128, 32), CopyAxis(4, 32, 64), CopyAxis(2, 16, 16)], 16
    )
    assert shape.axes == (CopyAxis(4, 32, 64), CopyAxis(2, 128, 32))
    assert shape.run == 32
    assert shape.extents == (256, 256)


def test_with_a_conversion_a_run_grows_where_each_sides_stride_is_of_its_own_elements() -> (
    None
):
    shape = Shape.from_axes([CopyAxis(4, 16, 8)], 8, conversion=TO_FLOAT8)
    assert (shape.axes, shape.run) == ((), 32)
    assert Shape.from_axes([CopyAxis(4, 16, 16)], 8, conversion=TO_FLOAT8).axes == (
        CopyAxis(4, 16, 16),
    )


@given(seed=st.integers(0, 1 << 30))
def test_merging_changes_nothing_of_what_is_copied(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.choice((1, 2, 3)) for _ in range(draw.randint(1, 4))]
    run = draw.choice((1, 2, 16))
    (source, source_bytes), (destination, destination_bytes) = (
        laid_out(draw, counts, run, 1) for _ in range(2)
    )
    if draw.random() < 0.5:
        destination, destination_bytes = source, source_bytes
    axes = [CopyAxis(*loop) for loop in zip(counts, source, destination, strict=True)]
    merged = Shape.from_axes(axes, run)
    data = random_bytes(draw, source_bytes)
    written = []
    for shape in (
        merged,
        plain(
            axes,
            run,
            source_unit_stride=(0, 0),
            destination_unit_stride=(0, 0),
            conversion=None,
        ),
    ):
        cache = np.zeros(destination_bytes, dtype=np.uint8)
        definitions.relayout(
            WaveTable.from_rows([shape], [(0, 0, 0, 0, 1, 0)], [(0,) * 4]), data, cache
        )
        written.append(cache)
    assert (written[0] == written[1]).all()
    assert len(merged.axes) <= len([count for count in counts if count > 1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"axes": (CopyAxis(2, 1, 1),) * 5, "run": 1},
        {"axes": (), "run": 0},
        {"axes": (CopyAxis(0, 1, 1),), "run": 1},
        {"axes": (CopyAxis(2, -1, 1),), "run": 1},
        {"axes": (), "run": 1, "source_unit_stride": (-1, 0)},
        {"axes": (CopyAxis(2, 1, 1, True),), "run": 1},
    ],
)
def test_what_is_no_shape_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        Shape(**wrong)  # type: ignore[arg-type]


def test_every_format_that_the_planner_converts_has_a_type_and_a_number_of_its_own() -> (
    None
):
    assert {kind.value for kind in ElementType} == ITEM_BYTES.keys()
    assert sorted(kind.code for kind in ElementType) == [1, 2, 3, 4, 5]


SHAPE = Shape(
    axes=(CopyAxis(3, 32, 64),),
    run=16,
    source_unit_stride=(128, 0),
    destination_unit_stride=(256, 0),
)
HEADS = Shape(
    axes=(CopyAxis(4, 2, 1, True),),
    run=1,
    conversion=ElementConversion(ElementType.BFLOAT16, ElementType.FLOAT8_E4M3),
)


def pieces(rows: list[tuple[int, int, int, int]], scale_rows: int = 4) -> Pieces:
    scales = np.ones((scale_rows, 2), dtype=np.float32)
    return Pieces((SHAPE, HEADS), np.array(rows, dtype=np.int64).reshape(-1, 4), scales)


def halves(column: np.int64) -> tuple[int, int]:
    """The lower and the upper 32 bits."""
    return int(column) & 0xFFFFFFFF, int(column) >> 32


def compile_table(table: WaveTable, tile: int) -> DeviceTable:
    return DeviceTable.compile(table, DevicePieces.compile(table.pieces), tile)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ((0, 0, 2, 0), r"shape of piece 0 is 2; expected 0 … 1"),
        ((0, 0, -1, 0), r"shape of piece 0 is -1"),
        ((0, 0, 1, 1), r"scale row of piece 0 is 1; expected 0 … 0"),
        ((0, 0, 1, -1), r"scale row of piece 0 is -1"),
    ],
)
def test_an_index_that_leaves_its_table_is_refused(
    piece: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(InvalidTable, match=message):
        pieces([piece])


@pytest.mark.parametrize("units", [(-1, 1), (0, 3), (2, 1)])
def test_a_range_that_leaves_the_units_is_refused(units: tuple[int, int]) -> None:
    places = np.zeros((2, 4), dtype=np.int32)
    with pytest.raises(
        InvalidTable,
        match=re.escape(
            f"units of shape 1 are [{units[0]}, {units[1]}); expected some of 2"
        ),
    ):
        WaveTable(pieces([(0, 0, 0, 0)]), ((0, 2), units), places)
    with pytest.raises(
        InvalidTable, match="1 ranges of units; expected one for each of the shapes"
    ):
        WaveTable(pieces([(0, 0, 0, 0)]), ((0, 2),), places)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_finite_number_above_zero_is_refused(scale: float) -> None:
    with pytest.raises(InvalidTable, match="finite and above 0"):
        WaveTable.from_rows(
            [SHAPE], [(0, 0, 0, 0, 1, 0)], [(0, 0, 0, 0)], [(1.0, scale)]
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": np.zeros((1, 4), dtype=np.int32)},
        {"rows": np.zeros((1, 5), dtype=np.int64)},
        {"units": np.zeros((1, 4), dtype=np.uint64)},
        {"scales": np.ones((1, 2), dtype=np.float64)},
    ],
)
def test_arrays_of_another_type_or_size_are_refused(changed: dict[str, Any]) -> None:
    def make(rows: Any, units: Any, scales: Any) -> WaveTable:
        return WaveTable(Pieces((SHAPE,), rows, scales), ((0, 1),), units)

    fields: dict[str, Any] = {
        "rows": np.zeros((1, 4), dtype=np.int64),
        "units": np.zeros((1, 4), dtype=np.int32),
        "scales": np.ones((1, 2), dtype=np.float32),
    }
    make(**fields)
    with pytest.raises(InvalidTable):
        make(**{**fields, **changed})


@pytest.mark.parametrize("column", range(4))
def test_a_negative_place_is_refused_wherever_it_leads(column: int) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    middle = memory.data_ptr() + 32
    shape = Shape(
        axes=(), run=8, source_unit_stride=(8, 8), destination_unit_stride=(8, 8)
    )
    unit = [0, 0, 0, 0]
    unit[column] = -1
    table = WaveTable.from_rows([shape], [(middle, middle, 0, 0, 1, 0)], [unit])
    own = Memory([memory])
    with pytest.raises(InvalidTable, match="is negative"):
        Bounds(table.pieces, own, own).check(table)


@given(d=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1), by=st.integers(-1, 1))
def test_dividing_by_multiplying_is_dividing(d: int, n: int, by: int) -> None:
    multiplier, shift = divisor(d)
    assert multiplier < 2**32
    for number in (n, min(2**31 - 1, max(0, n // d * d + by))):
        assert (2 * number * multiplier >> 32) >> shift == number // d


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tile", [1, 4, 256])
def test_programs_cover_every_chunk_of_every_piece_once(seed: int, tile: int) -> None:
    table = random_case(seed, converts=seed % 2 == 1).table
    compiled = compile_table(table, tile)
    moved = [0, 0]
    for piece, row in enumerate(compiled.pieces):
        (chunks, shape), (first, _) = halves(row[2]), halves(row[3])
        tiles = [
            halves(program)[1]
            for program in compiled.programs
            if halves(program)[0] == piece
        ]
        assert tiles == list(range(-(-chunks // tile)))
        source, destination = halves(compiled.shapes[shape, 3])
        copies = not compiled.shapes[shape, 0] >> 8 & 63
        addresses = row[0] + (compiled.units[first : first + 1, 0] if chunks else 0)
        assert not copies or (addresses % max(1, source) == 0).all(), (
            "aligned to what a lane reads"
        )
        moved[0] += chunks * source
        moved[1] += chunks * destination
    assert sum(moved) == moved_bytes(table)


@pytest.mark.parametrize("seed", range(20))
def test_a_part_of_the_pieces_that_is_shifted_has_the_rows_of_pieces_that_lie_there(
    seed: int,
) -> None:
    whole = random_case(seed, converts=seed % 2 == 1).table
    count = len(whole.pieces.rows)
    which, shifts = slice(count // 3, count), np.arange(5, 5 + count - count // 3)
    part = replace(whole, shifts=shifts, selected=which)
    there = replace(whole, pieces=replace(whole.pieces, rows=part.rows))
    once, anew = compile_table(part, 4), compile_table(there, 4)
    assert (once.programs == anew.programs).all()
    assert (once.pieces[:, [0, 1, 3]] == anew.pieces[:, [0, 1, 3]]).all()
    assert (once.pieces[:, 2] & 0xFFFFFFFF == anew.pieces[:, 2] & 0xFFFFFFFF).all()
    kinds = (one.shapes[one.pieces[:, 2] >> 32] for one in (once, anew))
    assert (next(kinds) == next(kinds)).all(), "as wide, and of the same shape"
    assert (once.units == anew.units).all()
    assert moved_bytes(part) == moved_bytes(there)


@pytest.mark.parametrize(
    ("source", "destination", "stride", "run", "width"),
    [
        (0, 0, 256, 256, 16),
        (8, 0, 256, 256, 8),
        (0, 4, 256, 256, 4),
        (0, 0, 258, 256, 2),
        (0, 0, 256, 15, 1),
    ],
)
def test_a_lane_moves_the_most_that_addresses_and_strides_allow(
    source: int, destination: int, stride: int, run: int, width: int
) -> None:
    shape = Shape(axes=(CopyAxis(2, stride, 512),), run=run)
    table = WaveTable.from_rows(
        [shape], [(source, destination, 0, 0, 1, 0)], [(0, 0, 0, 0)]
    )
    assert (compile_table(table, 64).shapes[:, 0] & 31).tolist() == [width]


def test_a_piece_of_too_many_chunks_is_refused() -> None:
    table = WaveTable.from_rows(
        [Shape(axes=(CopyAxis(MAX_CHUNKS, 1, 2),), run=1)],
        [(0, 0, 0, 0, 1, 0)],
        [(0, 0, 0, 0)],
    )
    with pytest.raises(InvalidTable, match=f"a piece has {MAX_CHUNKS} chunks"):
        compile_table(table, 64)


def test_a_run_that_reaches_further_than_a_lane_can_count_is_refused() -> None:
    DevicePieces.compile(
        WaveTable.from_rows(
            [Shape(axes=(), run=2**32)], [(0, 0, 0, 0, 1, 0)], [(0, 0, 0, 0)]
        ).pieces
    )
    with pytest.raises(InvalidTable, match=f"{2**32 + 16} bytes"):
        DevicePieces.compile(
            WaveTable.from_rows(
                [Shape(axes=(), run=2**32 + 16)], [(0, 0, 0, 0, 1, 0)], [(0, 0, 0, 0)]
            ).pieces
        )


def test_units_of_a_shape_that_no_piece_has_lead_nowhere() -> None:
    memory = torch.zeros(32, dtype=torch.uint8)
    at = np.array([[memory.data_ptr()] * 2 + [0, 0]], dtype=np.int64)
    own = Memory([memory])
    units = np.array([(0, 0, 0, 0), (7, 0, 7, 0)], dtype=np.int32)
    table = WaveTable(
        Pieces((Shape(axes=(), run=32), SHAPE), at), ((0, 1), (1, 2)), units
    )
    Bounds(table.pieces, own, own).check(table)


def test_shapes_of_the_same_units_and_strides_share_their_offsets_and_unused_shapes_have_none() -> (
    None
):
    wide = Shape(
        axes=(), run=48, source_unit_stride=(128, 2), destination_unit_stride=(256, 3)
    )
    other = replace(wide, source_unit_stride=(64, 0))
    rows = np.array(
        [(0, 0, 0, 0), (16, 16, 1, 0), (0, 0, 2, 0), (0, 0, 3, 0)], dtype=np.int64
    )
    units = np.array([(1, 5, 7, 9), (1 << 30, 0, 1 << 30, 0)], dtype=np.int32)
    whole = WaveTable(
        Pieces((wide, replace(wide, run=32), other, wide), rows),
        ((0, 2), (0, 2), (0, 2), (1, 2)),
        units,
    )
    compiled = compile_table(whole, 64)
    assert compiled.units.tolist() == [
        [128 + 10, 7 * 256 + 27],
        [128 << 30, 256 << 30],
        [64, 7 * 256 + 27],
        [64 << 30, 256 << 30],
        [128 << 30, 256 << 30],
    ]
    assert [halves(row[3])[0] for row in compiled.pieces] == [0, 0, 2, 4]
    assert (
        compile_table(replace(whole, selected=slice(2, 3)), 64).units.tolist()
        == compiled.units[2:4].tolist()
    )
