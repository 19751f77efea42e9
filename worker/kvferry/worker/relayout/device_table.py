"""A wave's table as the kernel reads it: one buffer of numbers, made by numpy.

Five sections, each aligned to 256 bytes:

| section    | type    | per       | columns                                                                        |
| ---------- | ------- | --------- | ------------------------------------------------------------------------------ |
| `programs` | int32   | program   | piece; its tile in the piece                                                   |
| `pieces`   | int64   | piece     | source, destination, row of its shape, first unit, chunks, first row of scales |
| `shapes`   | int64   | shape and width | 0 width · 1, 2 conversion · 3 scaled · 4 number of axes · 5–9 sizes · 10–14 multipliers · 15–19 shifts · 20–24 source strides · 25–29 destination strides · 30–33 strides of the unit's columns · 34–38 rows of scales |
| `units`    | int32   | unit      | source block, source position, destination block, destination position         |
| `scales`   | float32 | row       | source, destination                                                            |

A *chunk* is the part that one lane moves: `width` bytes, or `width` elements where there is a conversion. The chunks of
a piece are numbered over units, axes and run, the run innermost. There are five loops, the innermost first: the chunks
of a run, then the axes. `sizes`, the strides and the rows of scales have one column for each loop. A lane divides its
chunk's number by the sizes to find its place, and divides by multiplying:

    n div d = (n · multiplier >> 32) >> shift        for 0 ≤ n < 2**31 and d ≥ 2

with `shift = ceil(log2 d) - 1` and `multiplier = floor(2**(32 + shift) / d) + 1` (Granlund and Montgomery 1994, theorem 4.2).
"""  # noqa: E501 (a table's row is one line)

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvferry.worker.relayout.shape import MAX_AXES, Axis, Shape
from kvferry.worker.relayout.wave_table import (
    DESTINATION,
    NO_SCALES,
    SCALE,
    SHAPE,
    SOURCE,
    InvalidTable,
    Pieces,
    WaveTable,
)

SECTION_ALIGNMENT = 256
PROGRAM_COLUMNS, PIECE_COLUMNS, SHAPE_COLUMNS = 2, 6, 39
MAX_CHUNKS = 2**31
"""Chunks of one piece; the division above holds below it."""
CONVERTED_TOGETHER = 8
"""Elements that one lane converts where the strides allow."""


@dataclass(frozen=True, eq=False)
class DevicePieces:
    """The common part of the tables of all waves of some pieces.

    Attributes:
        rows: the section `pieces` for waves of one unit without a shift.
        shapes, scales: the sections.
    """

    rows: NDArray[np.int64]
    shapes: NDArray[np.int64]
    scales: NDArray[np.float32]

    @classmethod
    def of(cls, pieces: Pieces) -> DevicePieces:
        """Compile pieces: the access width of each, and the rows of its shape."""
        rows = np.zeros((len(pieces.rows), PIECE_COLUMNS), dtype=np.int64)
        kinds = np.stack([pieces.rows[:, SHAPE], _widths(pieces)], axis=1)
        distinct, of_piece = np.unique(kinds, axis=0, return_inverse=True)
        scaled = bool((pieces.scales != 1).any())
        compiled = [_shape_row(pieces.shapes[shape], width, scaled) for shape, width in distinct.tolist()]
        shapes = np.array(compiled, dtype=np.int64).reshape(-1, SHAPE_COLUMNS)
        rows[:, 0], rows[:, 1] = pieces.rows[:, SOURCE], pieces.rows[:, DESTINATION]
        rows[:, 2] = of_piece.ravel()
        rows[:, 4] = shapes[rows[:, 2], 5 : 6 + MAX_AXES].prod(axis=1)
        rows[:, 5] = pieces.rows[:, SCALE]
        return cls(rows, shapes, pieces.scales if pieces.converts else NO_SCALES)


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """See the module.

    Attributes:
        programs, pieces, shapes, units, scales: the sections.
    """

    programs: NDArray[np.int32]
    pieces: NDArray[np.int64]
    shapes: NDArray[np.int64]
    units: NDArray[np.int32]
    scales: NDArray[np.float32]

    @classmethod
    def of(cls, table: WaveTable, compiled: DevicePieces, tile: int) -> DeviceTable:
        """The table for programs that move `tile` chunks each.

        Args:
            compiled: the pieces of `table`.

        Raises:
            InvalidTable: a piece has too many chunks.
        """
        rows = compiled.rows[table.which].copy()
        ranges = np.array(table.ranges, dtype=np.int64).reshape(-1, 2)[table.pieces.rows[table.which, SHAPE]]
        rows[:, 0] += table.shifts * table.pieces.source_strides[table.which]
        rows[:, 3] = ranges[:, 0]
        rows[:, 4] *= ranges[:, 1] - ranges[:, 0]
        chunks = rows[:, 4]
        if len(chunks) and chunks.max() >= MAX_CHUNKS:
            raise InvalidTable(f"a piece has {chunks.max()} chunks; expected less than {MAX_CHUNKS}")
        tiles = -(-chunks // tile)
        behind = tiles.cumsum()
        programs = np.empty((int(tiles.sum()), PROGRAM_COLUMNS), dtype=np.int32)
        programs[:, 0] = np.arange(len(rows), dtype=np.int32).repeat(tiles)
        programs[:, 1] = np.arange(len(programs), dtype=np.int32)
        programs[:, 1] -= (behind - tiles).astype(np.int32).repeat(tiles)
        return cls(programs, rows, compiled.shapes, table.units, compiled.scales)

    @property
    def sections(self) -> tuple[NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32], ...]:
        return (self.programs, self.pieces, self.shapes, self.units, self.scales)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each section in the buffer, and last the end of the buffer."""
        sizes = (-(-array.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT for array in self.sections)
        return tuple(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def write(self, buffer: NDArray[np.uint8]) -> None:
        """Write the sections to the start of a buffer of at least `num_bytes`."""
        for offset, array in zip(self.offsets, self.sections, strict=False):
            buffer[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def divisor(d: int) -> tuple[int, int]:
    """Multiplier and shift for dividing by `d`; (0, 0) for 1, where no division is needed."""
    if d < 2:
        return (0, 0)
    shift = (d - 1).bit_length() - 1
    return ((1 << (32 + shift)) // d + 1, shift)


def _widths(pieces: Pieces) -> NDArray[np.int64]:
    """The width of each piece: the most bytes, up to 16, or elements, that its strides and addresses allow.

    The strides of source blocks count too, so that a wave's shifts do not reduce it.
    """
    limits = np.array([_limits(shape) for shape in pieces.shapes], dtype=np.int64).reshape(-1, 3)
    sources, destinations, shapes = (pieces.rows[:, column] for column in (SOURCE, DESTINATION, SHAPE))
    source, destination, most = limits[shapes].T
    fits = (sources % source == 0) & (destinations % destination == 0)
    converts = np.array([shape.conversion is not None for shape in pieces.shapes], dtype=bool)[shapes]
    copied = np.gcd(np.gcd(sources, destinations), most)
    return np.where(converts, np.where(fits, most, 1), copied)


def _limits(shape: Shape) -> tuple[int, int, int]:
    """The required alignment of the source's and the destination's addresses, and the width that it allows."""
    source = [*shape.source_unit_stride, *(axis.source_stride for axis in shape.axes)]
    destination = [*shape.destination_unit_stride, *(axis.destination_stride for axis in shape.axes)]
    if shape.conversion is None:
        width = int(np.gcd.reduce([16, shape.run, *source, *destination]))
        return (1, 1, width)
    here, there = (size * CONVERTED_TOGETHER for size in shape.element_bytes)
    fits = not any(stride % here for stride in source) and not any(stride % there for stride in destination)
    return (here, there, CONVERTED_TOGETHER if fits and shape.run % CONVERTED_TOGETHER == 0 else 1)


def _shape_row(shape: Shape, width: int, scaled: bool) -> list[int]:
    here, there = shape.element_bytes
    run = Axis(shape.run // width, width * here, width * there)
    loops = [run, *reversed(shape.axes), *[Axis(1, 0, 0)] * (MAX_AXES - len(shape.axes))]
    multipliers, shifts = zip(*(divisor(loop.steps) for loop in loops), strict=True)
    codes = (shape.conversion.source.code, shape.conversion.destination.code) if shape.conversion else (0, 0)
    return [
        width,
        *codes,
        int(scaled),
        len(shape.axes),
        *(loop.steps for loop in loops),
        *multipliers,
        *shifts,
        *(loop.source_stride for loop in loops),
        *(loop.destination_stride for loop in loops),
        *shape.source_unit_stride,
        *shape.destination_unit_stride,
        *(int(loop.scaled) for loop in loops),
    ]
