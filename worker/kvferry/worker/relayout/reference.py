"""The relayout in numpy and torch: used by CPU engines, and the reference for every other implementation.

One gather and one scatter per piece, over all its units at once, from host memory to host memory. Elements are
converted by torch's casts, those of one or two bytes with a lookup table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.device import HOST, DeviceMark
from kvferry.worker.relayout.port import Allocation, Bounds, Memory, OncePerPieces
from kvferry.worker.relayout.shape import ElementConversion, ElementType, Shape
from kvferry.worker.relayout.wave_table import (
    DESTINATION,
    MAX_UNITS,
    SCALE,
    SHAPE,
    SOURCE,
    Pieces,
    WaveTable,
)

TORCH_TYPES = {
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT32: torch.float32,
    ElementType.FLOAT8_E4M3: torch.float8_e4m3fn,
    ElementType.FLOAT8_E5M2: torch.float8_e5m2,
}
_LARGEST = {ElementType.FLOAT8_E4M3: 448.0, ElementType.FLOAT8_E5M2: 57344.0}
_NAN = {
    ElementType.BFLOAT16: 0x7FC0,
    ElementType.FLOAT16: 0x7E00,
    ElementType.FLOAT32: 0x7FC00000,
    ElementType.FLOAT8_E4M3: 0x7F,
    ElementType.FLOAT8_E5M2: 0x7F,
}
_LONG_RUN_BYTES = 4096
"""Runs of this length and more are copied as bytes: numpy gives the interpreter's lock away while it copies more than
500 elements, and one long run is one element of an opaque type."""

_LONG_UNIT_BYTES = 256 << 10
"""Units of this size and more are copied one by one."""

_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class ReferenceRelayout:
    """The relayout without a kernel of its own.

    Args:
        sources: host memory that waves are read from, e.g. the staging buffer.
        destinations: host memory that they are written to, e.g. the caches.
    """

    def __init__(
        self, sources: Iterable[Allocation], destinations: Iterable[Allocation]
    ) -> None:
        self._sources = Memory(sources)
        self._destinations = Memory(destinations)
        # A function of the module, not a method: a relayout that refers to itself is not freed with its last user, and
        # mapped memory of a peer stays mapped as long.
        self._bounds = OncePerPieces(
            partial(_bounds_between, self._sources, self._destinations)
        )
        self.launches = 0

    def mark(self) -> DeviceMark:
        """See `Relayout.mark`."""
        return HOST.mark()

    def most_units(self, pieces: Pieces) -> int:
        """See `BoundedRelayout.most_units`."""
        return MAX_UNITS

    def try_start(self, table: WaveTable) -> DeviceMark:
        """Put a wave in place. See `Relayout.try_start`; it is done when this returns."""
        self._bounds(table.pieces).check(table)
        rows = table.rows
        # By the addresses of the pieces before their shifts: a shifted piece may begin outside of
        # its allocation, although its units are inside.
        sources = self._sources.allocations_of(
            table.pieces.rows[table.selected, SOURCE]
        )
        destinations = self._destinations.allocations_of(rows[:, DESTINATION])
        has_units = False
        for row, source, destination in zip(
            rows.tolist(), sources.tolist(), destinations.tolist(), strict=True
        ):
            shape = table.pieces.shapes[row[SHAPE]]
            first_unit, stop_unit = table.ranges[row[SHAPE]]
            if first_unit == stop_unit:
                continue
            has_units = True
            units = table.units[first_unit:stop_unit].astype(np.int64)
            source_starts = row[SOURCE] + units[:, :2] @ np.array(
                shape.source_unit_stride
            )
            destination_starts = row[DESTINATION] + units[:, 2:] @ np.array(
                shape.destination_unit_stride
            )
            read, read_index = _elements(shape, 0, self._sources, source, source_starts)
            written, written_index = _elements(
                shape, 1, self._destinations, destination, destination_starts
            )
            # Bytes are copied by numpy, on one thread: the engine computes on all cores.
            if shape.conversion is None:
                _copy(written, written_index, read, read_index)
            else:
                first_scale = row[SCALE]
                scales = table.pieces.scales[
                    first_scale : first_scale + shape.scale_rows
                ]
                written[written_index] = _convert(
                    read[read_index], shape, shape.conversion, scales
                )
        if has_units:
            self.launches += 1
        return HOST.mark()


def _bounds_between(sources: Memory, destinations: Memory, pieces: Pieces) -> Bounds:
    return Bounds(pieces, sources, destinations)


def _elements(
    shape: Shape, side: int, memory: Memory, allocation: int, starts: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64] | slice]:
    """The units of a piece in one allocation, as an array of runs, or of elements where there is a conversion.

    Args:
        side: 0 for the source, 1 for the destination.
        starts: address of each unit.

    Returns:
        `[units, *axes]` or `[units, *axes, run]`, and the index of all units. Units that are not equally far apart are
        at some of the first axis's places: the index names them.
    """
    counts = [axis.steps for axis in shape.axes]
    strides = [
        (axis.source_stride, axis.destination_stride)[side] for axis in shape.axes
    ]
    if shape.conversion is None and shape.run >= _LONG_RUN_BYTES:
        dtype = np.dtype(np.uint8)
        counts.append(shape.run)
        strides.append(1)
    elif shape.conversion is None:
        # A run is one element of an opaque type: numpy moves it with one copy.
        dtype = np.dtype(f"V{shape.run}")
    else:
        dtype = np.dtype(f"u{shape.element_bytes[side]}")
        counts.append(shape.run)
        strides.append(dtype.itemsize)
    start = int(starts.min())
    count, step, index = _regular_places(starts - start)
    elements: NDArray[Any] = np.ndarray(
        (count, *counts),
        dtype=dtype,
        buffer=memory.bytes_of(allocation),
        offset=start - memory.start_of(allocation),
        strides=(step, *strides),
    )
    return elements, index


def _copy(
    written: NDArray[Any],
    written_index: NDArray[np.int64] | slice,
    read: NDArray[Any],
    read_index: NDArray[np.int64] | slice,
) -> None:
    """Copy the units at these places of one array to those of the other."""
    has_index = isinstance(written_index, np.ndarray) or isinstance(
        read_index, np.ndarray
    )
    unit_bytes = math.prod(read.shape[1:]) * read.itemsize
    if not has_index or unit_bytes < _LONG_UNIT_BYTES:
        written[written_index] = read[read_index]
        return
    # With an index numpy gathers all units into memory of its own first. For long ones that is a second copy, which
    # leaves the processor's cache between the two.
    to_units = np.arange(len(written))[written_index].tolist()
    from_units = np.arange(len(read))[read_index].tolist()
    for to_unit, from_unit in zip(to_units, from_units, strict=True):
        written[to_unit] = read[from_unit]


def _regular_places(
    offsets: NDArray[np.int64],
) -> tuple[int, int, NDArray[np.int64] | slice]:
    """Equally distant places that contain all of these offsets: their number, their distance, and which they are."""
    distances = np.diff(offsets)
    if not len(distances):
        return len(offsets), 0, slice(None)
    step = int(distances[0])
    # A slice, where it will do: numpy then copies without an index.
    if step > 0 and (distances == step).all():
        return len(offsets), step, slice(None)
    step = int(np.gcd.reduce(offsets))
    # All units are in the same place.
    if step == 0:
        step = 1
    places = offsets // step
    return int(places.max()) + 1, step, places


def _convert(
    codes: NDArray[Any],
    shape: Shape,
    conversion: ElementConversion,
    scales: NDArray[np.float32],
) -> NDArray[Any]:
    """The converted codes; those of one or two bytes with a lookup table."""
    source_bytes = conversion.source.num_bytes
    scale_rows = _scale_rows(shape)
    # A table of all codes of four bytes would have 16 GiB.
    if source_bytes > 2:
        scales_of_elements = torch.from_numpy(scales[scale_rows])
        # A copy, also of codes that lie together: of a peer's memory, which cannot be written, torch would warn.
        raw = torch.from_numpy(np.array(codes, order="C").view(f"i{source_bytes}"))
        converted = convert(
            raw, conversion, scales_of_elements[..., 0], scales_of_elements[..., 1]
        )
        return np.asarray(
            converted.numpy().view(f"u{conversion.destination.num_bytes}")
        )
    if len(scales) > 1:
        codes = codes + (scale_rows << (8 * source_bytes))
    return np.asarray(_all_codes(conversion, scales.tobytes())[codes])


@lru_cache(maxsize=1024)
def _all_codes(conversion: ElementConversion, scales: bytes) -> NDArray[Any]:
    """The converted code of every source code, one scale row after the other: up to 64 Ki codes a row, made once."""
    rows = torch.frombuffer(bytearray(scales), dtype=torch.float32).view(-1, 2, 1)
    source_bytes = conversion.source.num_bytes
    half = 1 << (8 * source_bytes - 1)
    # Bits are signed integers in torch: in the order of the codes the positive ones come first.
    codes = torch.arange(-half, half).roll(half).to(_BY_BYTES[source_bytes])
    converted = convert(codes.repeat(len(rows), 1), conversion, rows[:, 0], rows[:, 1])
    return np.asarray(
        converted.view(-1).numpy().view(f"u{conversion.destination.num_bytes}")
    )


def _scale_rows(shape: Shape) -> NDArray[np.int64]:
    """The row of scales of every combination of axis indices, to be broadcast: `[1, *axes or 1, 1]`."""
    rows = np.zeros(1, dtype=np.int64)
    for axis in shape.axes:
        rows = rows[..., None]
        if axis.scaled:
            rows = rows + np.arange(axis.steps)
    return rows[..., None]


def convert(
    raw: torch.Tensor,
    conversion: ElementConversion,
    source_scale: torch.Tensor,
    destination_scale: torch.Tensor,
) -> torch.Tensor:
    """The bits of the converted elements, by torch's own casts; see `kvferry.worker.relayout.shape`.

    Args:
        raw: the elements' bits as integers of their size.
        source_scale, destination_scale: float32, broadcast against `raw`.

    Returns:
        Integers of the destination's size, in the shape of `raw`.
    """
    target = conversion.destination
    decoded = raw.contiguous().view(TORCH_TYPES[conversion.source]).to(torch.float32)
    value = decoded * source_scale / destination_scale
    largest = _LARGEST.get(target)
    if largest is not None:
        value = value.clamp(-largest, largest)
    bits = _BY_BYTES[target.num_bytes]
    encoded = value.to(TORCH_TYPES[target]).view(bits)
    is_nan = decoded.isnan()
    # torch's casts differ in the sign of a NaN, so the code is written out with the source's sign.
    if is_nan.any():
        positive = _NAN[target]
        negative = positive - (1 << (8 * target.num_bytes - 1))
        encoded[is_nan] = torch.where(raw[is_nan] < 0, negative, positive).to(bits)
    return encoded
