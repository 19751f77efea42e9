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
of a run, then the axes. A lane divides its chunk's number by the sizes to find its place (`divisor`).
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
PIECE_COLUMNS = 4
SHAPE_COLUMNS = 12
UNIT_COLUMNS = 2

MAX_CHUNKS = 2**31
"""Chunks of one piece; the division by multiplying holds below it (`divisor`)."""

MAX_UNIT_BYTES = 2**32
"""Bytes that a unit reaches over: the kernel counts them in 32 bits. This, with fewer table loads and divisions by
multiplying, halved its instructions and brought it from 94 registers to 64."""

MAX_WIDTH = 16
"""Bytes that one lane copies where strides and addresses allow."""

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
    def compile(cls, pieces: Pieces) -> DevicePieces:
        """Compile pieces: the access width of each, and the rows of its shape.

        Raises:
            InvalidTable: a run is too long.
        """
        # A piece whose unit reaches beyond 32 bits becomes several rows: one for every step of the
        # axes that reach furthest. Those axes are left out of its shape.
        near_shapes: list[Shape] = []
        far_offsets: list[NDArray[np.int64]] = []
        for shape in pieces.shapes:
            near, far = _split_far_axes(shape)
            near_shapes.append(near)
            far_offsets.append(_offsets_of_steps(far))
        shape_numbers = pieces.rows[:, SHAPE]
        offsets_of_piece = [far_offsets[number] for number in shape_numbers.tolist()]
        rows_of_piece = [len(offsets) for offsets in offsets_of_piece]
        origins = np.arange(len(rows_of_piece)).repeat(rows_of_piece)
        offsets = np.concatenate([np.empty((0, 4), dtype=np.int64), *offsets_of_piece])

        # Pieces of one shape may be aligned differently, so a row of `shapes` is a shape and width.
        widths = np.stack([shape_numbers, _widths(pieces)], axis=1)
        distinct, kinds = np.unique(widths[origins], axis=0, return_inverse=True)
        kinds = kinds.ravel()
        has_scales = bool((pieces.scales != 1).any())
        shape_rows: list[list[int]] = []
        chunks: list[int] = []
        for number, width in distinct.tolist():
            near = near_shapes[number]
            shape_rows.append(_shape_row(near, width, has_scales=has_scales))
            chunks.append(
                near.run * math.prod(axis.steps for axis in near.axes) // width
            )

        scales = NO_SCALES
        if pieces.converts:
            scales = pieces.scales
        return cls(
            origins=origins,
            offsets=offsets,
            kinds=kinds,
            chunks=np.array(chunks, dtype=np.int64)[kinds],
            shapes=np.array(shape_rows, dtype=np.int64).reshape(-1, SHAPE_COLUMNS),
            scales=scales,
        )

    def rows(self, table: WaveTable) -> tuple[slice, NDArray[np.int64]]:
        """The rows of the section `pieces` that a wave of the pieces has, and their columns as in `wave_table`."""
        start_piece, stop_piece, _ = table.selected.indices(len(table.pieces.rows))
        start_row, stop_row = np.searchsorted(
            self.origins, (start_piece, stop_piece)
        ).tolist()
        own = slice(start_row, stop_row)
        return own, table.rows[self.origins[own] - start_piece] + self.offsets[own]


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
    def compile(
        cls, table: WaveTable, compiled: DevicePieces, tile: int
    ) -> DeviceTable:
        """The table for programs that move `tile` chunks each.

        Args:
            compiled: the pieces of `table`.

        Raises:
            InvalidTable: a piece has too many chunks.
        """
        own, rows = compiled.rows(table)
        shape_numbers = rows[:, SHAPE]
        first_units, unit_counts, units = _units(table, shape_numbers)
        chunks = compiled.chunks[own] * unit_counts[shape_numbers]
        if len(chunks) and chunks.max() >= MAX_CHUNKS:
            raise InvalidTable(
                f"a piece has {chunks.max()} chunks; expected less than {MAX_CHUNKS}"
            )
        pieces = np.empty((len(rows), PIECE_COLUMNS), dtype=np.int64)
        pieces[:, 0] = rows[:, SOURCE]
        pieces[:, 1] = rows[:, DESTINATION]
        pieces[:, 2] = chunks | compiled.kinds[own] << 32
        pieces[:, 3] = first_units[shape_numbers] | rows[:, SCALE] << 32
        tiles = -(-chunks // tile)
        first_program = tiles.cumsum() - tiles
        piece_of_program = np.arange(len(rows)).repeat(tiles)
        tile_of_program = (
            np.arange(len(piece_of_program)) - first_program[piece_of_program]
        )
        return cls(
            programs=piece_of_program | tile_of_program << 32,
            pieces=pieces,
            shapes=compiled.shapes,
            units=units,
            scales=compiled.scales,
        )

    @property
    def sections(self) -> tuple[NDArray[np.int64] | NDArray[np.float32], ...]:
        return (self.programs, self.pieces, self.shapes, self.units, self.scales)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each section in the buffer, and last the end of the buffer."""
        sizes = (
            -(-array.nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
            for array in self.sections
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
    """Multiplier and shift for dividing by `d`, at least 1. A lane divides by multiplying, since GPUs divide slowly:

        n div d = (2n · multiplier >> 32) >> shift        for 0 ≤ n < 2**31

    with `shift = ceil(log2 d)` and `multiplier = floor(2**(31 + shift) / d) + 1` (Granlund and Montgomery 1994, theorem
    4.2).
    """
    shift = (d - 1).bit_length()
    multiplier = (1 << (31 + shift)) // d + 1
    return multiplier, shift


def _units(
    table: WaveTable, shapes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The section `units`.

    Args:
        shapes: those of the wave's pieces.

    Returns:
        For each shape its first row of the section, for each shape its number of units, and the section.
    """
    first_rows = np.zeros(len(table.pieces.shapes), dtype=np.int64)
    counts = np.zeros(len(table.pieces.shapes), dtype=np.int64)
    # Shapes with the same units and the same strides share rows.
    shared: dict[tuple[tuple[int, int], ...], int] = {}
    sections = [np.empty((0, UNIT_COLUMNS), dtype=np.int64)]
    next_row = 0
    for number in np.unique(shapes).tolist():
        shape = table.pieces.shapes[number]
        first_unit, stop_unit = table.ranges[number]
        counts[number] = stop_unit - first_unit
        key = (
            table.ranges[number],
            shape.source_unit_stride,
            shape.destination_unit_stride,
        )
        if key in shared or first_unit == stop_unit:
            first_rows[number] = shared.get(key, next_row)
            continue
        # Multiplied out here, by the host: a lane then loads two offsets and multiplies nothing.
        units = table.units[first_unit:stop_unit].astype(np.int64)
        source = units[:, :2] * shape.source_unit_stride
        destination = units[:, 2:] * shape.destination_unit_stride
        sections.append(np.stack([source.sum(axis=1), destination.sum(axis=1)], axis=1))
        shared[key] = next_row
        first_rows[number] = next_row
        next_row += len(units)
    return first_rows, counts, np.concatenate(sections)


def _widths(pieces: Pieces) -> NDArray[np.int64]:
    """The width of each piece: the most bytes, up to `MAX_WIDTH`, or elements, that its strides and addresses allow."""
    limits = np.array(
        [_limits(shape) for shape in pieces.shapes], dtype=np.int64
    ).reshape(-1, 3)
    converts = np.array(
        [shape.conversion is not None for shape in pieces.shapes], dtype=bool
    )
    sources = pieces.rows[:, SOURCE]
    destinations = pieces.rows[:, DESTINATION]
    shape_numbers = pieces.rows[:, SHAPE]
    source_alignment, destination_alignment, widest = limits[shape_numbers].T
    is_aligned = sources % source_alignment == 0
    is_aligned &= destinations % destination_alignment == 0
    width_if_converted = np.where(is_aligned, widest, 1)
    width_if_copied = np.gcd(np.gcd(sources, destinations), widest)
    return np.where(converts[shape_numbers], width_if_converted, width_if_copied)


def _limits(shape: Shape) -> tuple[int, int, int]:
    """The required alignment of the source's and the destination's addresses, and the width that it allows."""
    # The strides of blocks count too, so that a wave's units and shifts do not reduce the width.
    source_strides = list(shape.source_unit_stride)
    destination_strides = list(shape.destination_unit_stride)
    for axis in shape.axes:
        source_strides.append(axis.source_stride)
        destination_strides.append(axis.destination_stride)
    if shape.conversion is None:
        width = np.gcd.reduce(
            [MAX_WIDTH, shape.run, *source_strides, *destination_strides]
        )
        return (1, 1, int(width))
    source_bytes, destination_bytes = shape.element_bytes
    source_alignment = source_bytes * CONVERTED_TOGETHER
    destination_alignment = destination_bytes * CONVERTED_TOGETHER
    is_aligned = (
        shape.run % CONVERTED_TOGETHER == 0
        and all(stride % source_alignment == 0 for stride in source_strides)
        and all(stride % destination_alignment == 0 for stride in destination_strides)
    )
    if is_aligned:
        return (source_alignment, destination_alignment, CONVERTED_TOGETHER)
    return (source_alignment, destination_alignment, 1)


def _split_far_axes(shape: Shape) -> tuple[Shape, tuple[CopyAxis, ...]]:
    """The shape without the axes that reach too far, and those."""
    far: list[CopyAxis] = []
    while max(shape.extents) > MAX_UNIT_BYTES and shape.axes:
        reaches = [
            (axis.steps - 1) * max(axis.source_stride, axis.destination_stride)
            for axis in shape.axes
        ]
        furthest = reaches.index(max(reaches))
        axes = list(shape.axes)
        far.append(axes.pop(furthest))
        shape = replace(shape, axes=tuple(axes))
    if max(shape.extents) > MAX_UNIT_BYTES:
        raise InvalidTable(
            f"a run has {max(shape.extents)} bytes; expected at most {MAX_UNIT_BYTES}"
        )
    return shape, tuple(far)


def _offsets_of_steps(far: Iterable[CopyAxis]) -> NDArray[np.int64]:
    """For each combination of the axes' steps the offsets, as in `DevicePieces`."""
    offsets = np.zeros((1, 4), dtype=np.int64)
    for axis in far:
        step = np.array(
            [axis.source_stride, axis.destination_stride, 0, int(axis.scaled)],
            dtype=np.int64,
        )
        offsets = (offsets[:, None] + np.arange(axis.steps)[:, None] * step).reshape(
            -1, 4
        )
    return offsets


_NO_LOOP = CopyAxis(1, 0, 0)


def _shape_row(shape: Shape, width: int, *, has_scales: bool) -> list[int]:
    """A row of the section `shapes`."""
    source_bytes, destination_bytes = shape.element_bytes
    fields = width | len(shape.axes) << 5
    if shape.conversion is not None:
        fields |= (
            shape.conversion.source.code << 8 | shape.conversion.destination.code << 11
        )
    if has_scales:
        fields |= 1 << 14
    loops = [
        CopyAxis(shape.run // width, width * source_bytes, width * destination_bytes)
    ]
    # A single step's strides count nothing, and may be too large for 32 bits.
    loops += [axis if axis.steps > 1 else _NO_LOOP for axis in reversed(shape.axes)]
    loops += [_NO_LOOP] * (1 + MAX_AXES - len(loops))
    columns: list[int] = []
    for level, loop in enumerate(loops):
        multiplier, shift = divisor(loop.steps)
        fields |= shift << (32 + 5 * level)
        if loop.scaled:
            fields |= 1 << (15 + level)
        # The size is stored negated: the kernel then needs one multiply-add for the remainder.
        columns.append(_int64(-loop.steps % (1 << 32), multiplier))
        columns.append(_int64(loop.source_stride, loop.destination_stride))
    return [fields, 0, *columns]


def _int64(lower: int, upper: int) -> int:
    """The int64 with these two halves."""
    return int(np.uint64(lower | upper << 32).astype(np.int64))
