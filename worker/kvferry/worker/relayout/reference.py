"""The relayout in numpy and torch: used by CPU engines, and the reference for every other implementation.

One gather and one scatter per piece, over all its units at once, from host memory to host memory. Elements are
converted by torch's casts, those of one or two bytes with a lookup table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

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
        # A function of the module, not a method: a relayout that refers to itself is not freed with its last user, and
        # mapped memory of a peer stays mapped as long.
        self._prepared = OncePerPieces(
            partial(_HostPieces.prepare, Memory(sources), Memory(destinations))
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
        prepared = self._prepared(table.pieces)
        prepared.bounds.check(table)
        offsets: dict[int, NDArray[np.int64]] = {}
        for row, source, destination in zip(
            table.rows.tolist(),
            prepared.sources[table.selected],
            prepared.destinations[table.selected],
            strict=True,
        ):
            number = row[SHAPE]
            shape = table.pieces.shapes[number]
            first_unit, stop_unit = table.ranges[number]
            if first_unit == stop_unit:
                continue
            if number not in offsets:
                units = table.units[first_unit:stop_unit]
                offsets[number] = units @ prepared.strides[number]
            addresses = offsets[number] + (row[SOURCE], row[DESTINATION])
            read = _Side(prepared.read[number], source)
            written = _Side(prepared.written[number], destination)
            if shape.conversion is None:
                _copy(read, written, addresses)
                continue
            first_scale = row[SCALE]
            scales = table.pieces.scales[first_scale : first_scale + shape.scale_rows]
            codes, read_index = read.units_at(addresses[:, 0])
            converted, written_index = written.units_at(addresses[:, 1])
            converted[written_index] = _convert(
                codes[read_index], shape, shape.conversion, scales
            )
        if offsets:
            self.launches += 1
        return HOST.mark()


class _Allocation(NamedTuple):
    """Host memory that a piece lies in: uint8 `[bytes]`, and the address of its first byte."""

    memory: NDArray[np.uint8]
    address: int


class _Elements(NamedTuple):
    """One side of a shape's units, as an array of runs, or of elements where there is a conversion.

    Attributes:
        counts: of a unit: `[*axes]` or `[*axes, run]`.
        strides: bytes, likewise.
    """

    dtype: np.dtype[Any]
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of_shape(cls, shape: Shape, side: int) -> _Elements:
        """Those of one side of a shape.

        Args:
            side: 0 for the source, 1 for the destination.
        """
        counts = [axis.steps for axis in shape.axes]
        strides = [
            (axis.source_stride, axis.destination_stride)[side] for axis in shape.axes
        ]
        if shape.conversion is None and shape.run < _LONG_RUN_BYTES:
            # A run is one element of an opaque type: numpy moves it with one copy.
            return cls(np.dtype(f"V{shape.run}"), tuple(counts), tuple(strides))
        dtype = np.dtype(np.uint8)
        if shape.conversion is not None:
            dtype = np.dtype(f"u{shape.element_bytes[side]}")
        return cls(dtype, (*counts, shape.run), (*strides, dtype.itemsize))

    @property
    def unit_bytes(self) -> int:
        return math.prod(self.counts) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class _HostPieces:
    """What is derived from pieces once.

    Attributes:
        sources, destinations: by piece.
        read, written: by shape.
        strides: by shape, int64 `[4, 2]`: multiplied by units, `[n, 4]`, they give the offsets of each in the source
            and in the destination.
    """

    bounds: Bounds
    sources: list[_Allocation]
    destinations: list[_Allocation]
    read: list[_Elements]
    written: list[_Elements]
    strides: list[NDArray[np.int64]]

    @classmethod
    def prepare(
        cls, sources: Memory, destinations: Memory, pieces: Pieces
    ) -> _HostPieces:
        return cls(
            bounds=Bounds(pieces, sources, destinations),
            sources=_allocations(sources, pieces, SOURCE),
            destinations=_allocations(destinations, pieces, DESTINATION),
            read=[_Elements.of_shape(shape, 0) for shape in pieces.shapes],
            written=[_Elements.of_shape(shape, 1) for shape in pieces.shapes],
            strides=[_unit_strides(shape) for shape in pieces.shapes],
        )


def _unit_strides(shape: Shape) -> NDArray[np.int64]:
    strides = np.zeros((4, 2), dtype=np.int64)
    strides[:2, 0] = shape.source_unit_stride
    strides[2:, 1] = shape.destination_unit_stride
    return strides


def _allocations(memory: Memory, pieces: Pieces, side: int) -> list[_Allocation]:
    # By the addresses of the pieces before their shifts: a shifted piece may begin outside of its allocation, although
    # its units are inside.
    indices = memory.allocations_of(pieces.rows[:, side]).tolist()
    return [
        _Allocation(memory.bytes_of(index), memory.start_of(index)) for index in indices
    ]


class _Side(NamedTuple):
    """One side of a piece."""

    elements: _Elements
    allocation: _Allocation

    def unit_at(self, address: int) -> NDArray[Any]:
        """One unit as an array of elements."""
        memory, start = self.allocation
        dtype, counts, strides = self.elements
        return np.ndarray(counts, dtype, memory, address - start, strides)

    def units_at(
        self, addresses: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64] | slice]:
        """An array `[units, *elements]`, and the index of all units in it. Units that are not equally far apart are at
        some of the first axis's places: the index names them."""
        memory, start = self.allocation
        dtype, counts, strides = self.elements
        lowest = int(addresses.min())
        count, step, index = _regular_places(addresses - lowest)
        array: NDArray[Any] = np.ndarray(
            (count, *counts), dtype, memory, lowest - start, (step, *strides)
        )
        return array, index


def _copy(read: _Side, written: _Side, addresses: NDArray[np.int64]) -> None:
    """Copy units. By numpy, on one thread: the engine computes on all cores.

    Args:
        addresses: of each unit on both sides, `[units, 2]`.
    """
    # All units together need an index where they are not equally far apart, and with one numpy gathers them into memory
    # of its own first. For long ones that is a second copy, which leaves the processor's cache between the two.
    if read.elements.unit_bytes < _LONG_UNIT_BYTES:
        from_units, from_index = read.units_at(addresses[:, 0])
        to_units, to_index = written.units_at(addresses[:, 1])
        to_units[to_index] = from_units[from_index]
        return
    for source, destination in addresses.tolist():
        written.unit_at(destination)[...] = read.unit_at(source)


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
