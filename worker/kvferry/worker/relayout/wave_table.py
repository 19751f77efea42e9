"""What one wave is to do: shapes, and three arrays whose rows are numbers only.

`pieces`, int64 `[T, 6]`: one row per thing to put in place, e.g. the K of one layer in one head range.

| column | name        | meaning                                                                            |
| ------ | ----------- | ---------------------------------------------------------------------------------- |
| 0      | SOURCE      | address of the piece's first byte in block 0, position 0 of the source             |
| 1      | DESTINATION | the same in the cache: (`PagedTensor.base` and the first head)                     |
| 2      | SHAPE       | index of its shape                                                                 |
| 3, 4   | FIRST, STOP | the units `[first, stop)` that it has; every cache group has its own               |
| 5      | SCALE       | first row of its scales; the row of a unit's element is this + Σ index of scaled axes |

`units`, int32 `[U, 4]`: where a unit is: source block, source position, destination block, destination position. What
a block and a position are is up to the strides of the shape; usually a source block is a chunk of the wave.

`scales`, float32 `[S, 2]`: the scale of the source and that of the destination.

Example: a wave of 2 chunks of 64 bytes, each 2 heads of 4 tokens of 8 bytes (heads outermost), goes to a cache of
blocks of 4 tokens with tokens outermost. `Shape.of([Axis(2, 32, 8), Axis(4, 8, 16)], 8, source_pace=(64, 0),
destination_pace=(64, 0))`, one piece `(wave, cache, 0, 0, 2, 0)`, units `(0, 0, 7, 0)` and `(1, 0, 3, 0)`: the wave's
byte 40 (chunk 0, head 1, token 1, byte 0) goes to the cache's 7·64 + 1·8 + 1·16 = 472.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.relayout.shape import Shape

SOURCE, DESTINATION, SHAPE, FIRST, STOP, SCALE = range(6)
SOURCE_BLOCK, SOURCE_POSITION, DESTINATION_BLOCK, DESTINATION_POSITION = range(4)

NO_SCALES: NDArray[np.float32] = np.ones((1, 2), dtype=np.float32)
"""Row 0 for pieces whose scales are 1."""


class InvalidTable(LocalProtocolError):
    """A wave's table contradicts itself or leaves the memory that it may touch."""


class Extents(NamedTuple):
    """Per piece the half-open ranges of addresses that it touches; pieces without units are left out."""

    source_start: NDArray[np.int64]
    source_stop: NDArray[np.int64]
    destination_start: NDArray[np.int64]
    destination_stop: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class WaveTable:
    """See the module.

    Raises:
        InvalidTable: an array has another type or shape, or an index leaves its table, or a scale is not a finite
            number above 0.
    """

    shapes: tuple[Shape, ...]
    pieces: NDArray[np.int64]
    units: NDArray[np.int32]
    scales: NDArray[np.float32] = field(default_factory=lambda: NO_SCALES)

    def __post_init__(self) -> None:
        for name, columns, dtype in (("pieces", 6, np.int64), ("units", 4, np.int32), ("scales", 2, np.float32)):
            array = getattr(self, name)
            if array.ndim != 2 or array.shape[1] != columns or array.dtype != dtype:
                raise InvalidTable(f"{name} are {array.dtype} {array.shape}, not {dtype.__name__} [n, {columns}]")
        if not len(self.pieces):
            return
        scale_rows = np.array([shape.scale_rows for shape in self.shapes], dtype=np.int64)
        _within("shape", self.pieces[:, SHAPE], 0, len(self.shapes))
        _within("first unit", self.pieces[:, FIRST], 0, len(self.units) + 1)
        _within("stop unit", self.pieces[:, STOP] - self.pieces[:, FIRST], 0, len(self.units) + 1)
        _within("stop unit", self.pieces[:, STOP], 0, len(self.units) + 1)
        _within("scale row", self.pieces[:, SCALE], 0, len(self.scales) + 1 - scale_rows[self.pieces[:, SHAPE]])
        if len(self.units) and self.units.min() < 0:
            raise InvalidTable("a unit's block or position is negative")
        if not (np.isfinite(self.scales).all() and (self.scales > 0).all()):
            raise InvalidTable(f"scales must be finite and above 0: {self.scales[:4].tolist()} …")

    @classmethod
    def of(
        cls,
        shapes: Sequence[Shape],
        pieces: Sequence[Sequence[int]],
        units: Sequence[Sequence[int]],
        scales: Sequence[tuple[float, float]] = ((1.0, 1.0),),
    ) -> WaveTable:
        """The table of plain rows; for tests and small things."""
        return cls(
            tuple(shapes),
            np.array(pieces, dtype=np.int64).reshape(-1, 6),
            np.array(units, dtype=np.int32).reshape(-1, 4),
            np.array(scales, dtype=np.float32).reshape(-1, 2),
        )

    @cached_property
    def piece_units(self) -> NDArray[np.int64]:
        """Units of each piece."""
        return np.asarray(self.pieces[:, STOP] - self.pieces[:, FIRST])

    @cached_property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes that the wave reads, and that it writes; its tables apart."""
        per_unit = np.array([shape.unit_bytes for shape in self.shapes], dtype=np.int64).reshape(-1, 2)
        total = (per_unit[self.pieces[:, SHAPE]] * self.piece_units[:, None]).sum(axis=0)
        return (int(total[0]), int(total[1]))

    def extents(self) -> Extents:
        """What every piece touches, exactly: the units are looked at, once per distinct range and strides."""
        paces = np.array([(*s.source_pace, *s.destination_pace) for s in self.shapes], dtype=np.int64).reshape(-1, 4)
        sizes = np.array([shape.extents for shape in self.shapes], dtype=np.int64).reshape(-1, 2)
        pieces = self.pieces[self.piece_units > 0]
        keys = np.concatenate([pieces[:, FIRST : STOP + 1], paces[pieces[:, SHAPE]]], axis=1)
        distinct, of_piece = np.unique(keys, axis=0, return_inverse=True)
        reach = np.array([self._reach(*key) for key in distinct.tolist()], dtype=np.int64).reshape(-1, 4)
        reach = reach[of_piece.ravel()]
        size = sizes[pieces[:, SHAPE]]
        source, destination = pieces[:, SOURCE], pieces[:, DESTINATION]
        return Extents(
            source + reach[:, 0],
            source + reach[:, 1] + size[:, 0],
            destination + reach[:, 2],
            destination + reach[:, 3] + size[:, 1],
        )

    def _reach(self, first: int, stop: int, *paces: int) -> tuple[int, ...]:
        """Least and largest offset of the units `[first, stop)`, in the source and in the destination."""
        offsets = self.units[first:stop].astype(np.int64) * np.array(paces, dtype=np.int64)
        source, destination = offsets[:, 0] + offsets[:, 1], offsets[:, 2] + offsets[:, 3]
        return (int(source.min()), int(source.max()), int(destination.min()), int(destination.max()))


def _within(name: str, found: NDArray[np.int64], start: int, stop: int | NDArray[np.int64]) -> None:
    wrong = np.flatnonzero((found < start) | (found >= stop))
    if len(wrong):
        limit = stop if isinstance(stop, int) else int(stop[wrong[0]])
        raise InvalidTable(f"{name} of piece {wrong[0]} is {found[wrong[0]]}; expected {start} … {limit - 1}")
