"""Every implementation of the relayout against its definition; any byte that differs fails, guard bytes included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.worker.relayout.shape import (
    CopyAxis,
    ElementConversion,
    ElementType,
    Shape,
)
from kvferry.worker.relayout.wave_table import InvalidTable, WaveTable
from tests.worker.relayout import definitions
from tests.worker.relayout.cases import Case, random_case
from tests.worker.relayout.runners import Outcome, Runner

pytestmark = pytest.mark.slow


def check(run: Runner, case: Case, reproduce: str) -> Outcome:
    expected = case.destination.copy()
    definitions.relayout(case.table, case.source, expected)
    outcome = run(case)
    wrong = np.flatnonzero(outcome.destination != expected)
    assert not len(wrong), (
        f"{reproduce}: {len(wrong)} bytes differ, the first at {wrong[0]}: {case.table}"
    )
    return outcome


@pytest.mark.parametrize(
    "converts", [False, True], ids=["copies", "conversions and scales"]
)
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_waves_put_every_byte_in_its_place_and_touch_no_other(
    run: Runner, first: int, converts: bool
) -> None:
    for seed in range(first, first + 10):
        case = random_case(seed, converts=converts)
        outcome = check(run, case, f"random_case({seed}, converts={converts})")
        moves = any(first < stop for first, stop in case.table.ranges)
        assert outcome.launches == moves, "one launch for the whole wave"


def codes_of(kind: ElementType) -> np.ndarray:
    """All codes; of float32 all exponents with fractions around every rounding boundary of the narrower types."""
    if kind is not ElementType.FLOAT32:
        return np.arange(1 << (8 * kind.num_bytes), dtype=np.uint64).astype(
            definitions.UNSIGNED[kind.num_bytes]
        )
    near = [
        bit + by
        for bit in (0, *(1 << n for n in range(23)), *(3 << n for n in range(22)))
        for by in (-1, 0, 1)
    ]
    fractions = np.unique(np.array(near) % (1 << 23))
    signed = np.arange(512)[:, None] << 23
    return np.asarray((signed + fractions).ravel().astype(np.uint32))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 0.7)], ids=str)
@pytest.mark.parametrize("target", ElementType, ids=lambda kind: kind.value)
def test_every_code_of_every_type_is_rounded_to_nearest_even_and_saturates(
    run: Runner, target: ElementType, scales: tuple[float, float]
) -> None:
    shapes: list[Shape] = []
    rows, sources, expected, at, to = [], [], [], 0, 0
    for kind in ElementType:
        codes = codes_of(kind)
        codes = codes[: len(codes) // 8 * 8]
        rows.append((at, to, len(shapes), 0, 1, 0))
        shapes.append(
            Shape(axes=(), run=len(codes), conversion=ElementConversion(kind, target))
        )
        sources.append(codes.view(np.uint8))
        converted = definitions.convert(codes.astype(np.int64), (kind, target), scales)
        expected.append(
            converted.astype(definitions.UNSIGNED[target.num_bytes]).view(np.uint8)
        )
        at, to = at + len(sources[-1]), to + len(expected[-1])
    table = WaveTable.from_rows(shapes, rows, [(0, 0, 0, 0)], [scales])
    case = Case(table, np.concatenate(sources), np.full(to, 0xAA, dtype=np.uint8))
    found = run(case).destination
    for kind, row, values in zip(ElementType, rows, expected, strict=True):
        here = found[row[1] : row[1] + len(values)]
        wrong = np.flatnonzero(here != values) // target.num_bytes
        assert not len(wrong), (
            f"{kind.value} {codes_of(kind)[wrong[:4]]} → {here[wrong[:4]]}, not {values[wrong[:4]]}"
        )


def one(
    kind: ElementType,
    code: int,
    target: ElementType,
    scales: tuple[float, float] = (1, 1),
) -> Case:
    conversion = ElementConversion(kind, target)
    table = WaveTable.from_rows(
        [Shape(axes=(), run=1, conversion=conversion)],
        [(0, 0, 0, 0, 1, 0)],
        [(0,) * 4],
        [scales],
    )
    source = np.array([code], dtype=definitions.UNSIGNED[kind.num_bytes]).view(np.uint8)
    return Case(table, source, np.zeros(target.num_bytes, dtype=np.uint8))


B16, E4M3, E5M2, F16 = (
    ElementType.BFLOAT16,
    ElementType.FLOAT8_E4M3,
    ElementType.FLOAT8_E5M2,
    ElementType.FLOAT16,
)


@pytest.mark.parametrize(
    ("kind", "code", "target", "expected"),
    [
        (
            B16,
            0x41D8,
            E4M3,
            0x5E,
        ),  # 27 lies between 26 (0x5d) and 28 (0x5e): a tie, to even
        (B16, 0x43E8, E4M3, 0x7E),  # 464 lies between 448 and what would be 480
        (B16, 0x7F80, E4M3, 0x7E),  # infinity
        (B16, 0xFFC1, E4M3, 0xFF),  # a NaN, negative
        (B16, 0x3A80, E4M3, 0x00),  # 2**-10, half of the smallest: a tie, to even
        (B16, 0x7F80, E5M2, 0x7B),
        (E5M2, 0xFC, B16, 0xFF80),  # -infinity is a number of e5m2
        (E4M3, 0xFF, F16, 0xFE00),
    ],
)
def test_roundings_worked_out_by_hand(
    run: Runner, kind: ElementType, code: int, target: ElementType, expected: int
) -> None:
    found = run(one(kind, code, target)).destination.view(
        definitions.UNSIGNED[target.num_bytes]
    )
    assert hex(found[0]) == hex(expected)


def test_the_example_of_the_docstrings(run: Runner) -> None:
    """Of `wave_table` and of `_relayout_kernel`: byte 40 of the wave goes to byte 472 of the cache."""
    shape = Shape.from_axes(
        [CopyAxis(2, 32, 8), CopyAxis(4, 8, 16)],
        8,
        source_unit_stride=(64, 0),
        destination_unit_stride=(64, 0),
    )
    table = WaveTable.from_rows(
        [shape], [(0, 0, 0, 0, 2, 0)], [(0, 0, 7, 0), (1, 0, 3, 0)]
    )
    case = Case(
        table, np.arange(128, dtype=np.uint8), np.full(512, 0xEE, dtype=np.uint8)
    )
    cache = check(run, case, "the example").destination
    assert cache[472] == 40
    assert cache[448:512].reshape(4, 2, 8)[:, :, 0].tolist() == [
        [0, 32],
        [8, 40],
        [16, 48],
        [24, 56],
    ]
    assert cache[192:256].reshape(4, 2, 8)[:, :, 0].tolist() == [
        [64, 96],
        [72, 104],
        [80, 112],
        [88, 120],
    ]
    assert (cache[:192] == 0xEE).all()


def test_an_empty_wave_launches_nothing(run: Runner) -> None:
    table = WaveTable.from_rows(
        [Shape(axes=(), run=8)], [(0, 0, 0, 0, 0, 0)], [(0, 0, 0, 0)]
    )
    outcome = run(Case(table, np.zeros(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)))
    assert (outcome.launches, outcome.destination.tolist()) == (0, [0] * 8)


@pytest.mark.parametrize(
    ("piece", "unit", "message"),
    [
        ((1, 0, 0, 0, 1, 0), (0, 0, 0, 0), "source .* lies in none"),
        ((0, 1, 0, 0, 1, 0), (0, 0, 0, 0), "destination .* lies in none"),
        ((0, 0, 0, 0, 1, 0), (1, 0, 0, 0), "source .* lies in none"),
        ((0, 0, 0, 0, 1, 0), (0, 0, 0, 1), "destination .* lies in none"),
        ((0, -1, 0, 0, 1, 0), (0, 0, 0, 0), "destination .* lies in none"),
    ],
)
def test_what_leaves_the_memory_is_refused(
    run: Runner, piece: tuple[int, ...], unit: tuple[int, ...], message: str
) -> None:
    shape = Shape(
        axes=(), run=64, source_unit_stride=(1, 0), destination_unit_stride=(0, 1)
    )
    case = Case(
        WaveTable.from_rows([shape], [piece], [unit]),
        np.zeros(64, dtype=np.uint8),
        np.zeros(64, dtype=np.uint8),
    )
    with pytest.raises(InvalidTable, match=message):
        run(case)


@pytest.mark.parametrize(
    ("shift", "refused"), [(0, False), (1, False), (2, True), (-1, True)]
)
def test_what_is_shifted_out_of_the_source_is_refused(
    run: Runner, shift: int, refused: bool
) -> None:
    table = WaveTable.from_rows(
        [Shape(axes=(), run=32, source_unit_stride=(32, 0))],
        [(0, 0, 0, 0, 1, 0)],
        [(0, 0, 0, 0)],
    )
    case = Case(
        replace(table, shifts=np.array([shift])),
        np.arange(64, dtype=np.uint8),
        np.zeros(32, dtype=np.uint8),
    )
    if refused:
        with pytest.raises(InvalidTable, match=r"source .* lies in none"):
            run(case)
    else:
        assert run(case).destination.tolist() == list(
            range(32 * shift, 32 * shift + 32)
        )


FAR = (1 << 32) + 3 * 4096
"""A stride that 32 bits do not hold."""


@pytest.mark.parametrize(
    ("shape", "unit"),
    [
        (
            Shape(
                axes=(),
                run=48,
                source_unit_stride=(FAR, 0),
                destination_unit_stride=(FAR, 0),
            ),
            (1, 0, 1, 0),
        ),
        (
            Shape(
                axes=(),
                run=48,
                source_unit_stride=(FAR >> 12, 0),
                destination_unit_stride=(4096, 0),
            ),
            (4096, 0, FAR >> 12, 0),
        ),
        (
            Shape(
                axes=(),
                run=48,
                source_unit_stride=(0, FAR),
                destination_unit_stride=(0, FAR),
            ),
            (0, 1, 0, 1),
        ),
        (Shape(axes=(CopyAxis(2, FAR, FAR),), run=48), (0, 0, 0, 0)),
        (
            Shape(
                axes=(
                    CopyAxis(3, 16, 16),
                    CopyAxis(2, FAR, FAR),
                    CopyAxis(1, FAR, FAR),
                ),
                run=16,
            ),
            (0, 0, 0, 0),
        ),
        (
            Shape(
                axes=(CopyAxis(2, FAR, FAR, True),),
                run=48,
                conversion=ElementConversion(E5M2, E5M2),
            ),
            (0, 0, 0, 0),
        ),
    ],
    ids=[
        "a block's stride",
        "a block's number",
        "a position",
        "an axis",
        "the middle axis",
        "an axis with scales",
    ],
)
def test_offsets_beyond_two_to_the_32(
    run: Runner, shape: Shape, unit: tuple[int, int, int, int]
) -> None:
    """The axis's first step is at the start of the allocations, whose bytes are unset: only the second is compared."""
    case = Case(
        WaveTable.from_rows(
            [shape], [(5, 7, 0, 0, 1, 0)], [unit], [(1.0, 4.0), (2.0, 2.0)]
        ),
        np.arange(100, dtype=np.uint8),
        np.full(100, 0xEE, dtype=np.uint8),
        source_at=FAR,
        destination_at=FAR,
    )
    found = run(case).destination
    assert found.tolist() == [0xEE] * 7 + list(range(5, 53)) + [0xEE] * 45
