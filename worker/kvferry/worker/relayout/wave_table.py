"""The work of one wave: pieces, which do not change from wave to wave, and units, which do.

`Pieces.rows`, int64 `[T, 4]`: one row per part to put in place, e.g. the K of one layer in one head range.

| column | name        | meaning                                                                               |
| ------ | ----------- | ------------------------------------------------------------------------------------- |
| 0      | SOURCE      | address of the piece's first byte in block 0, position 0 of the source                |
| 1      | DESTINATION | the same in the cache: (`PagedTensor.base` and the first head)                        |
| 2      | SHAPE       | index of its shape                                                                    |
| 3      | SCALE       | first row of its scales; the row of a unit's element is this + Σ index of scaled axes |

`Pieces.scales`, float32 `[S, 2]`: the scale of the source and that of the destination.

`WaveTable.units`, int32 or int64 `[U, 4]`: the place of a unit: source block, source position, destination block,
destination position. The strides of the shape define blocks and positions; usually a source block is a chunk of the
staging buffer. The pieces of a shape have the units `[first, stop)` of its range; a shape with several ranges of units
is listed once for each. A wave may shift each piece by source blocks only, so its access width does not change.

Example: a wave of 2 chunks of 64 bytes, each 2 heads of 4 tokens of 8 bytes (heads outermost), goes to a cache of
blocks of 4 tokens with tokens outermost. `Shape.from_axes([CopyAxis(2, 32, 8), CopyAxis(4, 8, 16)], 8,
source_unit_stride=(64, 0), destination_unit_stride=(64, 0))`, one piece `(wave, cache, 0, 0)`, the range `(0, 2)`,
units `(0, 0, 7, 0)` and `(1, 0, 3, 0)`: the wave's byte 40 (chunk 0, head 1, token 1, byte 0) goes to the cache's
7·64 + 1·8 + 1·16 = 472.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.relayout.shape import Shape

SOURCE, DESTINATION, SHAPE, SCALE = range(4)

# A table has a row for every unit and one for every tile, and the size of tables is limited.
MAX_UNITS = 32768
"""Units of one table, at most, by what is planned for it."""

NO_SCALES: NDArray[np.float32] = np.ones((1, 2), dtype=np.float32)
"""A table of scales for pieces whose scales are 1, in row 0."""


_EVERY_PIECE = slice(None)


class InvalidTable(LocalProtocolError):
    """A wave's table contradicts itself or leaves the memory that it may touch."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """See the module. Made once for many waves; implementations keep what they derive for as long as it lives.

    Raises:
        InvalidTable: an array has another type or shape, or an index leaves its table, or a scale is not a finite
            number above 0.
    """

    shapes: tuple[Shape, ...]
    rows: NDArray[np.int64]
    scales: NDArray[np.float32] = field(default_factory=lambda: NO_SCALES)

    def __post_init__(self) -> None:
        _check_array("pieces", self.rows, 4, np.int64)
        _check_array("scales", self.scales, 2, np.float32)
        if not len(self.rows):
            return
        shape_numbers = self.rows[:, SHAPE]
        _check_within("shape", shape_numbers, 0, len(self.shapes))
        scale_rows = np.array(
            [shape.scale_rows for shape in self.shapes], dtype=np.int64
        )
        # A shape without a conversion has no scale rows: its number may then be one past the last.
        stops = len(self.scales) + 1 - scale_rows[shape_numbers]
        _check_within("scale row", self.rows[:, SCALE], 0, stops)
        are_scales_valid = np.isfinite(self.scales).all() and (self.scales > 0).all()
        if not are_scales_valid:
            raise InvalidTable(
                f"scales must be finite and above 0: {self.scales[:4].tolist()} …"
            )

    @cached_property
    def converts(self) -> bool:
        """True if any piece has a conversion."""
        return any(shape.conversion is not None for shape in self.shapes)

    @cached_property
    def source_strides(self) -> NDArray[np.int64]:
        """Bytes from one source block to the next, per piece."""
        strides = np.array(
            [shape.source_unit_stride[0] for shape in self.shapes], dtype=np.int64
        )
        return np.asarray(strides[self.rows[:, SHAPE]])


Span = tuple[int, int]
"""The least and the largest of some offsets."""


@dataclass(frozen=True, eq=False)
class WaveTable:
    """See the module.

    Attributes:
        ranges: the units `[first, stop)` of each shape.
        shifts: source blocks by which each of the wave's pieces is shifted; int64, one number or one for each. None
            shifts none.
        selected: the pieces of the wave.

    Raises:
        InvalidTable: the units have another type or shape, or a range leaves them.
    """

    pieces: Pieces
    ranges: tuple[tuple[int, int], ...]
    units: NDArray[np.int32] | NDArray[np.int64]
    shifts: NDArray[np.int64] | None = None
    selected: slice = field(default_factory=lambda: _EVERY_PIECE)

    def __post_init__(self) -> None:
        _check_array("units", self.units, 4, np.int32, np.int64)
        if len(self.ranges) != len(self.pieces.shapes):
            raise InvalidTable(
                f"{len(self.ranges)} ranges of units; expected one for each of the shapes"
            )
        for number, (first, stop) in enumerate(self.ranges):
            if not 0 <= first <= stop <= len(self.units):
                raise InvalidTable(
                    f"units of shape {number} are [{first}, {stop}); expected some of {len(self.units)}"
                )

    @classmethod
    def from_rows(
        cls,
        shapes: Sequence[Shape],
        rows: Sequence[Sequence[int]],
        units: Sequence[Sequence[int]] | NDArray[np.int32],
        scales: Sequence[tuple[float, float]] = ((1.0, 1.0),),
    ) -> WaveTable:
        """The table of rows (source, destination, shape, first unit, stop unit, scale), each with its own range."""
        # A shape is listed once for each of its ranges.
        kinds: dict[tuple[int, int, int], int] = {}
        pieces: list[tuple[int, int, int, int]] = []
        for source, destination, shape, first_unit, stop_unit, scale in rows:
            kind = kinds.setdefault((shape, first_unit, stop_unit), len(kinds))
            pieces.append((source, destination, kind, scale))
        return cls(
            Pieces(
                tuple(shapes[shape] for shape, _, _ in kinds),
                np.array(pieces, dtype=np.int64).reshape(-1, 4),
                np.array(scales, dtype=np.float32).reshape(-1, 2),
            ),
            tuple((first, stop) for _, first, stop in kinds),
            np.array(units, dtype=np.int32).reshape(-1, 4),
        )

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows of the wave's pieces, with its shifts applied."""
        rows = self.pieces.rows[self.selected]
        if self.shifts is None:
            return rows
        shifted = rows.copy()
        shifted[:, SOURCE] += self.shifts * self.pieces.source_strides[self.selected]
        return shifted

    def reaches(self) -> list[tuple[Span, Span] | None]:
        """Where the units of each shape begin; None for a shape without units.

        Returns:
            For each shape the least and the largest offset from a piece's address, in the source and in the
            destination, as if all blocks had all positions.

        Raises:
            InvalidTable: a unit's block or position is negative.
        """
        # Shapes of one source share a range, and minima over many units are the cost here: once for
        # each range. Of few units the calls are, and the arrays' own `min` takes twice as long as the reduction.
        corners: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for first, stop in dict.fromkeys(self.ranges):
            own = self.units[first:stop]
            if len(own):
                low = np.minimum.reduce(own).tolist()
                if min(low) < 0:
                    raise InvalidTable("a unit's block or position is negative")
                corners[first, stop] = (low, np.maximum.reduce(own).tolist())
        reaches: list[tuple[Span, Span] | None] = []
        for shape, units in zip(self.pieces.shapes, self.ranges, strict=True):
            if units in corners:
                low, high = corners[units]
                reaches.append(_reach(shape, low, high))
            else:
                reaches.append(None)
        return reaches


def _reach(shape: Shape, low: Sequence[int], high: Sequence[int]) -> tuple[Span, Span]:
    """Offsets at which units begin whose columns lie between `low` and `high`; no stride is negative."""
    block, position = shape.source_unit_stride
    source = (low[0] * block + low[1] * position, high[0] * block + high[1] * position)
    block, position = shape.destination_unit_stride
    destination = (
        low[2] * block + low[3] * position,
        high[2] * block + high[3] * position,
    )
    return source, destination


def _check_array(
    name: str, array: NDArray[np.generic], columns: int, *types: type[np.generic]
) -> None:
    if array.ndim != 2 or array.shape[1] != columns or array.dtype not in types:
        expected = " or ".join(dtype.__name__ for dtype in types)
        raise InvalidTable(
            f"{name} are {array.dtype} {array.shape}, not {expected} [n, {columns}]"
        )


def _check_within(
    name: str, values: NDArray[np.int64], start: int, stop: int | NDArray[np.int64]
) -> None:
    wrong = np.flatnonzero((values < start) | (values >= stop))
    if not len(wrong):
        return
    piece = wrong[0]
    limit = int(np.broadcast_to(stop, values.shape)[piece])
    raise InvalidTable(
        f"{name} of piece {piece} is {values[piece]}; expected {start} … {limit - 1}"
    )
