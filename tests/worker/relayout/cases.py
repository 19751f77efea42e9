"""Random waves: every stride order, block size, head range and alignment that a table can express."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvferry.worker.relayout.shape import (
    CopyAxis,
    ElementConversion,
    ElementType,
    Shape,
)
from kvferry.worker.relayout.wave_table import WaveTable

GUARD_BYTES = 64
MOST_ELEMENTS = 1500
"""Of one unit: the interpreter takes milliseconds for a program."""


@dataclass(frozen=True)
class Case:
    """One wave. The addresses in its table are offsets in the two arrays.

    Attributes:
        source_at, destination_at: bytes of either allocation before its array, which nothing initialises.
    """

    table: WaveTable
    source: NDArray[np.uint8]
    destination: NDArray[np.uint8]
    source_at: int = 0
    destination_at: int = 0

    def at(self, source: int, destination: int) -> WaveTable:
        """The table with the arrays at these addresses."""
        rows = self.table.pieces.rows + np.array([source, destination, 0, 0])
        return replace(self.table, pieces=replace(self.table.pieces, rows=rows))


def random_bytes(draw: random.Random, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(draw.randbytes(count), dtype=np.uint8).copy()


def laid_out(
    draw: random.Random, counts: list[int], run_bytes: int, grain: int
) -> tuple[list[int], int]:
    """Strides for loops in a random order, with and without gaps, so that no two cells overlap; and their extent."""
    strides, extent = [0] * len(counts), run_bytes
    for loop in draw.sample(range(len(counts)), len(counts)):
        strides[loop] = extent + draw.choice((0, 0, grain, 3 * grain))
        extent += (counts[loop] - 1) * strides[loop]
    return strides, extent


def random_case(seed: int, *, converts: bool = False) -> Case:
    """A wave of a few shapes, some pieces of each, and a list of units per shape."""
    draw = random.Random(seed)
    shapes: list[Shape] = []
    rows: list[tuple[int, ...]] = []
    units: list[tuple[int, ...]] = []
    scales: list[tuple[float, float]] = []
    source_at = destination_at = GUARD_BYTES
    for index in range(draw.randint(1, 3)):
        conversion = None
        if converts and draw.random() < 0.8:
            conversion = ElementConversion(
                *(draw.choice(list(ElementType)) for _ in range(2))
            )
        shape, unit_strides, axes = random_shape(draw, conversion)
        source_loops, destination_loops, pieces = unit_strides
        first, stop = len(units), len(units) + draw.choice((0, 1, 2, 5))
        places = [
            (block, at)
            for block in range(destination_loops[0][0])
            for at in range(destination_loops[0][1])
        ]
        stop = min(stop, first + len(places))
        for block, position in draw.sample(places, stop - first):
            units.append(
                (
                    draw.randrange(source_loops[0][0]),
                    draw.randrange(source_loops[0][1]),
                    block,
                    position,
                )
            )
        shapes.append(shape)
        for piece in range(pieces):
            source, destination = (
                source_at + piece * source_loops[1],
                destination_at + piece * destination_loops[1],
            )
            rows.append((source, destination, index, first, stop, len(scales)))
            if shape.conversion and draw.random() < 0.7:
                scales += [
                    (
                        draw.choice((1.0, 0.37, 3.1, 2.0**-7)),
                        draw.choice((1.0, 0.02, 7.7)),
                    )
                    for _ in range(axes)
                ]
            else:
                scales += [(1.0, 1.0)] * axes
        source_at += source_loops[2] + 16 * draw.randint(0, 4)
        destination_at += destination_loops[2] + 16 * draw.randint(0, 4)
    rows = draw.sample(rows, len(rows))
    return Case(
        WaveTable.from_rows(shapes, rows, units, scales),
        random_bytes(draw, source_at + GUARD_BYTES),
        random_bytes(draw, destination_at + GUARD_BYTES),
    )


Loops = tuple[tuple[int, int], int, int]
"""Blocks and positions; bytes from one piece to the next; bytes of everything."""


def random_shape(
    draw: random.Random, conversion: ElementConversion | None
) -> tuple[Shape, tuple[Loops, Loops, int], int]:
    """A shape, the layout of its pieces on both sides, and the number of scales of a piece."""
    counts = [
        draw.choice((1, 2, 2, 3, 4, 7)) for _ in range(draw.choice((0, 1, 2, 3, 4, 4)))
    ]
    pieces = draw.randint(1, 3)
    together = draw.choice((1, 2, 4, 8))  # of a lane: the alignment
    run = together * draw.choice((1, 1, 2, 3, 5))
    if conversion is None:
        run *= draw.choice((1, 2, 16))
    while math.prod(counts) * run > MOST_ELEMENTS:
        counts.pop()
    if conversion is None:
        grains = (together, together) if run % 16 else (draw.choice((1, 16)),) * 2
        sizes = (1, 1)
    else:
        sizes = (conversion.source.num_bytes, conversion.destination.num_bytes)
        grains = (sizes[0] * together, sizes[1] * together)
    sides = []
    for size, grain in zip(sizes, grains, strict=True):
        blocks, positions = draw.randint(1, 6), draw.randint(1, 3)
        strides, extent = laid_out(
            draw, [*counts, blocks, positions, pieces], run * size, grain
        )
        whole = -(-extent // 64) * 64
        sides.append((strides, (blocks, positions), whole))
    scaled = (
        draw.randrange(len(counts))
        if counts and conversion and draw.random() < 0.5
        else None
    )
    axes = [
        CopyAxis(count, sides[0][0][loop], sides[1][0][loop], loop == scaled)
        for loop, count in enumerate(counts)
    ]
    unit_strides = [
        (strides[len(counts)], strides[len(counts) + 1]) for strides, _, _ in sides
    ]
    make = Shape.from_axes if draw.random() < 0.7 else plain
    shape = make(
        axes,
        run,
        source_unit_stride=unit_strides[0],
        destination_unit_stride=unit_strides[1],
        conversion=conversion,
    )
    here, there = ((size, strides[-1], whole) for strides, size, whole in sides)
    return shape, (here, there, pieces), 1 if scaled is None else counts[scaled]


def plain(
    axes: list[CopyAxis],
    run: int,
    *,
    source_unit_stride: tuple[int, int],
    destination_unit_stride: tuple[int, int],
    conversion: ElementConversion | None,
) -> Shape:
    """The axes as they are, unmerged and in any order."""
    return Shape(
        axes=tuple(axes),
        run=run,
        source_unit_stride=source_unit_stride,
        destination_unit_stride=destination_unit_stride,
        conversion=conversion,
    )
