"""A wave's table as the kernel reads it: one buffer of numbers, made by numpy.

Five sections, each aligned to 256 bytes:

| section    | type    | per       | columns                                                                        |
| ---------- | ------- | --------- | ------------------------------------------------------------------------------ |
| `programs` | int64   | program   | its piece · its tile in the piece                                              |
| `pieces`   | int64   | piece     | 0 source · 1 destination · 2 chunks · its shape · 3 its first unit · its first row of scales |
| `shapes`   | int64   | shape and width | 0 fields, below · 1 unused · from 2, of each loop, minus its size · its multiplier; its source stride · its destination stride |
| `units`    | int64   | unit of a shape | 0 its offset in the source · 1 in the destination                        |
| `scales`   | float32 | row       | source, destination                                                            |

Two numbers in one column are its lower and its upper 32 bits. The fields of a shape, from bit 0: 5 bits width, 3 number
of axes, 3 and 3 conversion, 1 scaled, 5 which of the loops have scales of their own; from bit 32: 5 bits for the shift
of each loop.

A *chunk* is the part that one lane moves: `width` bytes, or `width` elements where there is a conversion. The chunks of
a piece are numbered over units, axes and run, the run innermost. There are five loops, the innermost first: the chunks
of a run, then the axes. A lane divides its chunk's number by the sizes to find its place, and divides by multiplying:

    n div d = (2n · multiplier >> 32) >> shift        for 0 ≤ n < 2**31

with `shift = ceil(log2 d)` and `multiplier = floor(2**(31 + shift) / d) + 1` (Granlund and Montgomery 1994, theorem 4.2).

The kernel counts bytes inside of a unit in 32 bits. A piece whose unit reaches further becomes several: one for every
step of the axes that reach furthest.
"""  # noqa: E501 (a table's row is one line)

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvferry.worker.relayout.shape import MAX_AXES, CopyAxis, Shape
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
PIECE_COLUMNS, SHAPE_COLUMNS, UNIT_COLUMNS = 4, 12, 2
MAX_CHUNKS = 2**31
"""Chunks of one piece; the division above holds below it."""
MAX_UNIT_BYTES = 2**32
CONVERTED_TOGETHER = 8
"""Elements that one lane converts where the strides allow."""


@dataclass(frozen=True, eq=False)
class DevicePieces:
    """The common part of the tables of all waves of some pieces.

    Attributes:
        origins: for each row of the section `pieces` its piece, ascending.
        offsets: `[row, 4]`, what each row adds to its piece: to source, destination, shape (0) and first row of scales.
        kinds: the shape of each row: its row in `shapes`.
        chunks: the chunks of one unit of each row.
        shapes, scales: the sections.
    """

    origins: NDArray[np.int64]
    offsets: NDArray[np.int64]
    kinds: NDArray[np.int64]
    chunks: NDArray[np.int64]
    shapes: NDArray[np.int64]
    scales: NDArray[np.float32]

    @classmethod
    def of(cls, pieces: Pieces) -> DevicePieces:
        """Compile pieces: the access width of each, and the rows of its shape.

        Raises:
            InvalidTable: a run is too long.
        """
        halves = [_halves(shape) for shape in pieces.shapes]
        steps = [_steps(far) for _, far in halves]
        of_piece = pieces.rows[:, SHAPE].tolist()
        origins = np.arange(len(of_piece)).repeat([len(steps[shape]) for shape in of_piece])
        offsets = np.concatenate(
            [np.empty((0, 4), dtype=np.int64), *(steps[shape] for shape in of_piece)]
        )
        widths = np.stack([pieces.rows[:, SHAPE], _widths(pieces)], axis=1)
        distinct, kinds = np.unique(widths[origins], axis=0, return_inverse=True)
        scaled = bool((pieces.scales != 1).any())
        shapes = [_shape_row(halves[shape][0], width, scaled) for shape, width in distinct.tolist()]
        near = [halves[shape][0] for shape in distinct[:, 0]]
        units = [shape.run * math.prod(axis.steps for axis in shape.axes) for shape in near]
        chunks = np.array(units, dtype=np.int64) // distinct[:, 1]
        return cls(
            origins,
            offsets,
            kinds.ravel(),
            chunks[kinds.ravel()],
            np.array(shapes, dtype=np.int64).reshape(-1, SHAPE_COLUMNS),
            pieces.scales if pieces.converts else NO_SCALES,
        )

    def rows(self, table: WaveTable) -> tuple[slice, NDArray[np.int64]]:
        """The rows of the section `pieces` that a wave of the pieces has, and their columns as in `wave_table`."""
        start, stop, _ = table.which.indices(len(table.pieces.rows))
        own = slice(*np.searchsorted(self.origins, (start, stop)).tolist())
        return own, table.rows[self.origins[own] - start] + self.offsets[own]


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """See the module.

    Attributes:
        programs, pieces, shapes, units, scales: the sections.
    """

    programs: NDArray[np.int64]
    pieces: NDArray[np.int64]
    shapes: NDArray[np.int64]
    units: NDArray[np.int64]
    scales: NDArray[np.float32]

    @classmethod
    def of(cls, table: WaveTable, compiled: DevicePieces, tile: int) -> DeviceTable:
        """The table for programs that move `tile` chunks each.

        Args:
            compiled: the pieces of `table`.

        Raises:
            InvalidTable: a piece has too many chunks.
        """
        own, rows = compiled.rows(table)
        firsts, counts, units = _units(table, rows[:, SHAPE])
        chunks = compiled.chunks[own] * counts[rows[:, SHAPE]]
        if len(chunks) and chunks.max() >= MAX_CHUNKS:
            raise InvalidTable(
                f"a piece has {chunks.max()} chunks; expected less than {MAX_CHUNKS}"
            )
        pieces = np.empty((len(rows), PIECE_COLUMNS), dtype=np.int64)
        pieces[:, 0], pieces[:, 1] = rows[:, SOURCE], rows[:, DESTINATION]
        pieces[:, 2] = chunks | compiled.kinds[own] << 32
        pieces[:, 3] = firsts[rows[:, SHAPE]] | rows[:, SCALE] << 32
        tiles = -(-chunks // tile)
        numbers = np.arange(int(tiles.sum()))
        of_program = np.arange(len(rows)).repeat(tiles)
        programs = of_program | (numbers - (tiles.cumsum() - tiles)[of_program]) << 32
        return cls(programs, pieces, compiled.shapes, units, compiled.scales)

    @property
    def sections(self) -> tuple[NDArray[np.int64] | NDArray[np.float32], ...]:
        return (self.programs, self.pieces, self.shapes, self.units, self.scales)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each section in the buffer, and last the end of the buffer."""
        sizes = (
            -(-array.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT for array in self.sections
        )
        return tuple(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        return self.offsets[-1]

    def write(self, buffer: NDArray[np.uint8]) -> None:
        """Write the sections to the start of a buffer of at least `num_bytes`."""
        for offset, array in zip(self.offsets, self.sections, strict=False):
            buffer[offset : offset + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )


def divisor(d: int) -> tuple[int, int]:
    """Multiplier and shift for dividing by `d`, at least 1."""
    shift = (d - 1).bit_length()
    return ((1 << (31 + shift)) // d + 1, shift)


def _units(
    table: WaveTable, shapes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For each shape its first row of the section `units` and its number of units; and the section.

    Shapes with the same units and the same strides share rows. `shapes`: those of the wave's pieces.
    """
    firsts, counts = np.zeros((2, len(table.pieces.shapes)), dtype=np.int64)
    rows: dict[tuple[tuple[int, int], ...], int] = {}
    found = [np.empty((0, UNIT_COLUMNS), dtype=np.int64)]
    stop = 0
    for number in np.unique(shapes).tolist():
        shape, own = table.pieces.shapes[number], table.ranges[number]
        counts[number] = own[1] - own[0]
        firsts[number] = rows.setdefault(
            (own, shape.source_unit_stride, shape.destination_unit_stride), stop
        )
        if firsts[number] == stop and counts[number]:
            units = table.units[slice(*own)].astype(np.int64)
            source = units[:, :2] * shape.source_unit_stride
            destination = units[:, 2:] * shape.destination_unit_stride
            found.append(np.stack([source.sum(axis=1), destination.sum(axis=1)], axis=1))
            stop += len(units)
    return firsts, counts, np.concatenate(found)


def _widths(pieces: Pieces) -> NDArray[np.int64]:
    """The width of each piece: the most bytes, up to 16, or elements, that its strides and addresses allow.

    The strides of source blocks count too, so that a wave's shifts do not reduce it.
    """
    limits = np.array([_limits(shape) for shape in pieces.shapes], dtype=np.int64).reshape(-1, 3)
    sources, destinations, shapes = (
        pieces.rows[:, column] for column in (SOURCE, DESTINATION, SHAPE)
    )
    source, destination, most = limits[shapes].T
    fits = (sources % source == 0) & (destinations % destination == 0)
    converts = np.array([shape.conversion is not None for shape in pieces.shapes], dtype=bool)[
        shapes
    ]
    copied = np.gcd(np.gcd(sources, destinations), most)
    return np.where(converts, np.where(fits, most, 1), copied)


def _limits(shape: Shape) -> tuple[int, int, int]:
    """The required alignment of the source's and the destination's addresses, and the width that it allows."""
    source = [*shape.source_unit_stride, *(axis.source_stride for axis in shape.axes)]
    destination = [
        *shape.destination_unit_stride,
        *(axis.destination_stride for axis in shape.axes),
    ]
    if shape.conversion is None:
        width = int(np.gcd.reduce([16, shape.run, *source, *destination]))
        return (1, 1, width)
    here, there = (size * CONVERTED_TOGETHER for size in shape.element_bytes)
    fits = not any(stride % here for stride in source) and not any(
        stride % there for stride in destination
    )
    return (here, there, CONVERTED_TOGETHER if fits and shape.run % CONVERTED_TOGETHER == 0 else 1)


def _halves(shape: Shape) -> tuple[Shape, tuple[CopyAxis, ...]]:
    """The shape without the axes that reach too far, and those."""
    far: tuple[CopyAxis, ...] = ()
    while max(shape.extents) > MAX_UNIT_BYTES and shape.axes:
        reaches = [
            (axis.steps - 1) * max(axis.source_stride, axis.destination_stride)
            for axis in shape.axes
        ]
        number = reaches.index(max(reaches))
        far += (shape.axes[number],)
        shape = replace(shape, axes=shape.axes[:number] + shape.axes[number + 1 :])
    if max(shape.extents) > MAX_UNIT_BYTES:
        raise InvalidTable(
            f"a run has {max(shape.extents)} bytes; expected at most {MAX_UNIT_BYTES}"
        )
    return shape, far


def _steps(far: Iterable[CopyAxis]) -> NDArray[np.int64]:
    """For each combination of steps the offsets, as in `DevicePieces`."""
    found = np.zeros((1, 4), dtype=np.int64)
    for axis in far:
        step = np.array(
            [axis.source_stride, axis.destination_stride, 0, int(axis.scaled)], dtype=np.int64
        )
        found = (found[:, None] + np.arange(axis.steps)[:, None] * step).reshape(-1, 4)
    return found


def _shape_row(shape: Shape, width: int, scaled: bool) -> list[int]:
    here, there = shape.element_bytes
    codes = (
        (shape.conversion.source.code, shape.conversion.destination.code)
        if shape.conversion
        else (0, 0)
    )
    run = CopyAxis(shape.run // width, width * here, width * there)
    fields = width | len(shape.axes) << 5 | codes[0] << 8 | codes[1] << 11 | int(scaled) << 14
    axes = [axis if axis.steps > 1 else CopyAxis(1, 0, 0) for axis in reversed(shape.axes)]
    loops: list[int] = []
    for level, loop in enumerate([run, *axes, *[CopyAxis(1, 0, 0)] * (MAX_AXES - len(axes))]):
        multiplier, shift = divisor(loop.steps)
        fields |= int(loop.scaled) << (15 + level) | shift << (32 + 5 * level)
        loops += [
            _int64(-loop.steps % (1 << 32), multiplier),
            _int64(loop.source_stride, loop.destination_stride),
        ]
    return [fields, 0, *loops]


def _int64(lower: int, upper: int) -> int:
    """The int64 with these two halves."""
    return int(np.uint64(lower | upper << 32).astype(np.int64))
