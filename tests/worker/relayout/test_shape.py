"""Shapes: the equivalent ones with the fewest axes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.conversion import ITEM_BYTES
from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.relayout.shape import Axis, Conversion, ElementType, Shape
from kvferry.worker.relayout.wave_table import WaveTable
from tests.worker.relayout import definitions
from tests.worker.relayout.cases import laid_out, plain, random_bytes

TO_FLOAT8 = Conversion(ElementType.BFLOAT16, ElementType.FLOAT8_E4M3)


def test_the_example_of_the_docstring() -> None:
    shape = Shape.of([Axis(2, 128, 32), Axis(4, 32, 64), Axis(2, 16, 16)], 16)
    assert shape.axes == (Axis(4, 32, 64), Axis(2, 128, 32))
    assert shape.run == 32
    assert shape.extents == (256, 256)


def test_equal_dense_sides_are_one_run() -> None:
    shape = Shape.of([Axis(3, 64, 64), Axis(4, 16, 16), Axis(1, 5, 9), Axis(8, 2, 2)], 2)
    assert (shape.axes, shape.run) == ((), 192)


def test_axes_that_continue_one_another_but_not_the_run_are_one() -> None:
    shape = Shape.of([Axis(3, 400, 800), Axis(4, 100, 200)], 16)
    assert (shape.axes, shape.run) == ((Axis(12, 100, 200),), 16)


def test_with_a_conversion_a_run_grows_where_each_sides_stride_is_of_its_own_elements() -> None:
    shape = Shape.of([Axis(4, 16, 8)], 8, conversion=TO_FLOAT8)
    assert (shape.axes, shape.run) == ((), 32)
    assert Shape.of([Axis(4, 16, 16)], 8, conversion=TO_FLOAT8).axes == (Axis(4, 16, 16),)


def test_an_axis_with_scales_is_never_merged() -> None:
    shape = Shape.of([Axis(4, 16, 8, scaled=True)], 8, conversion=TO_FLOAT8)
    assert (shape.axes, shape.run, shape.scale_rows) == ((Axis(4, 16, 8, True),), 8, 4)


@given(seed=st.integers(0, 1 << 30))
def test_merging_changes_nothing_of_what_is_copied(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.choice((1, 2, 3)) for _ in range(draw.randint(1, 4))]
    run = draw.choice((1, 2, 16))
    (source, source_bytes), (destination, destination_bytes) = (laid_out(draw, counts, run, 1) for _ in range(2))
    if draw.random() < 0.5:
        destination, destination_bytes = source, source_bytes
    axes = [Axis(*loop) for loop in zip(counts, source, destination, strict=True)]
    merged = Shape.of(axes, run)
    data = random_bytes(draw, source_bytes)
    written = []
    for shape in (merged, plain(axes, run, source_unit_stride=(0, 0), destination_unit_stride=(0, 0), conversion=None)):
        cache = np.zeros(destination_bytes, dtype=np.uint8)
        definitions.relayout(WaveTable.of([shape], [(0, 0, 0, 0, 1, 0)], [(0,) * 4]), data, cache)
        written.append(cache)
    assert (written[0] == written[1]).all()
    assert len(merged.axes) <= len([count for count in counts if count > 1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"axes": (Axis(2, 1, 1),) * 5, "run": 1},
        {"axes": (), "run": 0},
        {"axes": (Axis(0, 1, 1),), "run": 1},
        {"axes": (Axis(2, -1, 1),), "run": 1},
        {"axes": (), "run": 1, "source_unit_stride": (-1, 0)},
        {"axes": (Axis(2, 1, 1, True),), "run": 1},
    ],
)
def test_what_is_no_shape_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        Shape(**wrong)  # type: ignore[arg-type]


def test_every_format_that_the_planner_converts_has_a_type_and_a_number_of_its_own() -> None:
    assert {kind.value for kind in ElementType} == ITEM_BYTES.keys()
    assert sorted(kind.code for kind in ElementType) == [1, 2, 3, 4, 5]
