"""The relayout in numpy and torch: used by CPU engines, and the reference for every other implementation.

One gather and one scatter per piece, over all its units at once, from host memory to host memory. Bytes are copied by
numpy, on one thread, as the engine computes on all cores. Elements are converted by torch's casts, those of one or two
bytes with a lookup table.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.device import HOST, DeviceMark
from kvferry.worker.relayout.port import Bounds, Memory, OncePerPieces
from kvferry.worker.relayout.shape import ElementConversion, ElementType, Shape
from kvferry.worker.relayout.wave_table import DESTINATION, SCALE, SHAPE, SOURCE, WaveTable

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
_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class ReferenceRelayout:
    """The relayout without a kernel of its own.

    Args:
        sources: tensors in host memory that waves are read from, e.g. the staging buffer.
        destinations: tensors in host memory that they are written to, e.g. the caches.
    """

    def __init__(
        self, sources: Iterable[torch.Tensor], destinations: Iterable[torch.Tensor]
    ) -> None:
        self._sources = Memory(sources)
        self._destinations = Memory(destinations)
        self._bounds = OncePerPieces(
            lambda pieces: Bounds(pieces, self._sources, self._destinations)
        )
        self.launches = 0

    def mark(self) -> DeviceMark:
        """See `Relayout.mark`."""
        return HOST.mark()

    def try_start(self, table: WaveTable) -> DeviceMark:
        """Put a wave in place. See `Relayout.try_start`; it is done when this returns."""
        self._bounds(table.pieces).check(table)
        rows, shapes, ranges = table.rows, table.pieces.shapes, table.ranges
        sources = self._sources.allocations_of(table.pieces.rows[table.which, SOURCE])
        destinations = self._destinations.allocations_of(rows[:, DESTINATION])
        self.launches += any(
            ranges[shape][0] < ranges[shape][1] for shape in rows[:, SHAPE].tolist()
        )
        for piece, source, destination in zip(
            rows.tolist(), sources.tolist(), destinations.tolist(), strict=True
        ):
            shape, units = (
                shapes[piece[SHAPE]],
                table.units[slice(*ranges[piece[SHAPE]])].astype(np.int64),
            )
            if not len(units):
                continue
            here = piece[SOURCE] + units[:, :2] @ np.array(shape.source_unit_stride)
            there = piece[DESTINATION] + units[:, 2:] @ np.array(shape.destination_unit_stride)
            elements, read = _elements(shape, 0, self._sources, source, here)
            written, places = _elements(shape, 1, self._destinations, destination, there)
            if shape.conversion is None:
                written[places] = elements[read]
            else:
                scales = table.pieces.scales[piece[SCALE] : piece[SCALE] + shape.scale_rows]
                written[places] = _convert(elements[read], shape, shape.conversion, scales)
        return HOST.mark()


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
    counts, strides = (
        tuple(axis.steps for axis in shape.axes),
        tuple(axis[1 + side] for axis in shape.axes),
    )
    dtype = np.dtype(f"V{shape.run}")
    if shape.conversion is not None:
        dtype = np.dtype(f"u{shape.element_bytes[side]}")
        counts, strides = (*counts, shape.run), (*strides, dtype.itemsize)
    first, apart, places = int(starts.min()), np.diff(starts), None
    if not len(apart) or (apart[0] > 0 and (apart == apart[0]).all()):
        step, count = int(apart[0]) if len(apart) else 0, len(starts)
    else:
        step = int(np.gcd.reduce(starts - first)) or 1  # 0 where all units are in the same place
        places = (starts - first) // step
        count = int(places.max()) + 1
    whole: NDArray[Any] = np.ndarray(
        (count, *counts),
        dtype=dtype,
        buffer=memory.bytes_of(allocation).numpy(),
        offset=first - memory.start_of(allocation),
        strides=(step, *strides),
    )
    return whole, slice(None) if places is None else places


def _convert(
    codes: NDArray[Any], shape: Shape, conversion: ElementConversion, scales: NDArray[np.float32]
) -> NDArray[Any]:
    """The converted codes; those of one or two bytes with a lookup table."""
    bits = 8 * conversion.source.num_bytes
    rows = _scale_rows(shape)
    if bits > 16:
        by_step = torch.from_numpy(scales[rows])  # […, 2]
        raw = torch.from_numpy(np.ascontiguousarray(codes).view(f"i{bits // 8}"))
        converted = convert(raw, conversion, by_step[..., 0], by_step[..., 1])
        return np.asarray(converted.numpy().view(f"u{conversion.destination.num_bytes}"))
    if len(scales) > 1:
        codes = codes + (rows << bits)
    return np.asarray(_all_codes(conversion, scales.tobytes())[codes])


@lru_cache(maxsize=1024)
def _all_codes(conversion: ElementConversion, scales: bytes) -> NDArray[Any]:
    """The converted code of every source code, one scale row after the other: up to 64 Ki codes a row, made once."""
    rows = torch.frombuffer(bytearray(scales), dtype=torch.float32).view(-1, 2, 1)
    bits = 8 * conversion.source.num_bytes
    codes = (
        torch.arange(-(1 << (bits - 1)), 1 << (bits - 1))
        .roll(1 << (bits - 1))
        .to(_BY_BYTES[bits // 8])
    )
    converted = convert(codes.repeat(len(rows), 1), conversion, rows[:, 0], rows[:, 1])
    return np.asarray(converted.view(-1).numpy().view(f"u{conversion.destination.num_bytes}"))


def _scale_rows(shape: Shape) -> NDArray[np.int64]:
    """The row of scales of every combination of axis indices, to be broadcast: `[1, *axes or 1, 1]`."""
    rows = np.zeros(1, dtype=np.int64)
    for axis in shape.axes:
        rows = rows[..., None] + (
            np.arange(axis.steps) if axis.scaled else np.zeros(1, dtype=np.int64)
        )
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
    missing = decoded.isnan()
    if missing.any():  # torch's casts differ in the sign of a NaN
        negative = _NAN[target] - (1 << (8 * target.num_bytes - 1))
        encoded[missing] = torch.where(raw[missing] < 0, negative, _NAN[target]).to(bits)
    return encoded
