"""The relayout in torch and numpy: used by CPU engines, and the reference for every other implementation.

One gather and one scatter per piece, over all its units at once. Works on any device that torch has; from host memory
to host memory, numpy copies bytes, and elements of one or two bytes are converted with a lookup table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.caches import DeviceClock, DeviceMark
from kvferry.worker.relayout.port import Bounds, Memory, OncePerPieces
from kvferry.worker.relayout.shape import Conversion, ElementType, Shape
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
_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class ReferenceRelayout:
    """The relayout without a kernel of its own.

    Args:
        sources: tensors that waves are read from, e.g. the staging buffer.
        destinations: tensors that they are written to, e.g. the caches.
    """

    def __init__(self, sources: Iterable[torch.Tensor], destinations: Iterable[torch.Tensor]) -> None:
        destinations = tuple(destinations)
        self._sources = Memory(sources)
        self._destinations = Memory(destinations)
        self._bounds = OncePerPieces(lambda pieces: Bounds(pieces, self._sources, self._destinations))
        self._clock = DeviceClock(destinations[0].device if destinations else torch.device("cpu"))
        self._launches = 0

    @property
    def launches(self) -> int:
        """Waves so far: this implementation launches no kernel of its own."""
        return self._launches

    def mark(self) -> DeviceMark:
        """See `Relayout.mark`."""
        return self._clock.mark()

    def try_start(self, table: WaveTable) -> DeviceMark:
        """Put a wave in place. See `Relayout.try_start`; on the CPU it is done when this returns."""
        self._bounds(table.pieces).check(table)
        rows, shapes, ranges = table.rows, table.pieces.shapes, table.ranges
        sources = self._sources.allocations_of(table.pieces.rows[table.which, SOURCE])
        destinations = self._destinations.allocations_of(rows[:, DESTINATION])
        self._launches += any(ranges[shape][0] < ranges[shape][1] for shape in rows[:, SHAPE].tolist())
        for piece, source, destination in zip(rows.tolist(), sources.tolist(), destinations.tolist(), strict=True):
            shape, units = shapes[piece[SHAPE]], table.units[slice(*ranges[piece[SHAPE]])].astype(np.int64)
            if not len(units):
                continue
            sides = (
                _Side.of(self._sources, source, piece[SOURCE], shape.source_unit_stride, units[:, :2]),
                _Side.of(
                    self._destinations, destination, piece[DESTINATION], shape.destination_unit_stride, units[:, 2:]
                ),
            )
            if shape.conversion is None:
                _copy(shape, *sides)
            else:
                scales = table.pieces.scales[piece[SCALE] : piece[SCALE] + shape.scale_rows]
                _convert(shape, shape.conversion, *sides, scales)
        return self._clock.mark()


class _Side(NamedTuple):
    """One side of a piece: the allocation, and where each unit starts in it (bytes, int64 `[units]`)."""

    memory: torch.Tensor
    address: int
    starts: NDArray[np.int64]

    @classmethod
    def of(
        cls, memory: Memory, allocation: int, address: int, unit_stride: tuple[int, int], units: NDArray[np.int64]
    ) -> _Side:
        offset = address - memory.start_of(allocation)
        return cls(memory.bytes_of(allocation), memory.start_of(allocation), offset + units @ np.array(unit_stride))

    @property
    def divisors(self) -> int:
        """A number whose divisors among the powers of two also divide the addresses of all units."""
        return int(np.bitwise_or.reduce(self.starts)) | self.address

    def view(
        self, dtype: torch.dtype, counts: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A view of the units as elements of `dtype`, with these counts and strides in bytes.

        Returns:
            `[units, *counts]` and None where the units are equally far apart; else `[places, *counts]`, and for each
            unit the index of its place.
        """
        size = dtype.itemsize
        flat = self.memory[: self.memory.numel() // size * size].view(dtype)
        steps = tuple(stride // size for stride in strides)
        step, places = self._places(size)
        first = int(self.starts.min()) // size
        if places is None:
            return flat.as_strided((len(self.starts), *counts), (step // size, *steps), first), None
        indices = torch.from_numpy(places).to(flat.device)
        return flat.as_strided((int(places.max()) + 1, *counts), (step // size, *steps), first), indices

    def host_view(
        self, dtype: np.dtype[Any], counts: tuple[int, ...], strides: tuple[int, ...]
    ) -> tuple[NDArray[Any], NDArray[np.int64] | slice]:
        """As `view`, in host memory: a numpy array `[units or places, *counts]`, and the index for its first axis."""
        step, places = self._places(dtype.itemsize)
        count = len(self.starts) if places is None else int(places.max()) + 1
        whole: NDArray[Any] = np.ndarray(
            (count, *counts),
            dtype=dtype,
            buffer=self.memory.numpy(),
            offset=int(self.starts.min()),
            strides=(step, *strides),
        )
        return whole, slice(None) if places is None else places

    def _places(self, size: int) -> tuple[int, NDArray[np.int64] | None]:
        """Bytes from place to place, and each unit's place: None where unit `i` is in place `i`."""
        apart = np.diff(self.starts)
        if not len(apart) or (apart[0] > 0 and (apart == apart[0]).all()):
            return (int(apart[0]) if len(apart) else size), None
        offsets = self.starts - self.starts.min()
        step = int(np.gcd.reduce(offsets)) or size  # 0 where all units are in the same place
        return step, np.asarray(offsets // step)

    def read(self, dtype: torch.dtype, counts: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """`[units, *counts]`."""
        view, places = self.view(dtype, counts, strides)
        return view if places is None else view.index_select(0, places)

    def write(self, elements: torch.Tensor, counts: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Write `[units, *counts]`."""
        view, places = self.view(elements.dtype, counts, strides)
        elements = elements.to(view.device)
        if places is None:
            view.copy_(elements)
        else:
            view.index_put_((places,), elements)


def _copy(shape: Shape, source: _Side, destination: _Side) -> None:
    if source.memory.device.type == destination.memory.device.type == "cpu":
        _copy_on_host(shape, source, destination)
        return
    strides = [stride for axis in shape.axes for stride in axis[1:3]]
    width = math.gcd(16, shape.run, *strides, source.divisors, destination.divisors)
    counts = (*(axis.steps for axis in shape.axes), shape.run // width)
    dtype = _BY_BYTES[width]
    elements = source.read(dtype, counts, (*(axis.source_stride for axis in shape.axes), width))
    destination.write(elements, counts, (*(axis.destination_stride for axis in shape.axes), width))


def _copy_on_host(shape: Shape, source: _Side, destination: _Side) -> None:
    """Copy with numpy: on one thread, as the engine computes on all cores, and whole runs instead of elements."""
    counts, run = tuple(axis.steps for axis in shape.axes), np.dtype(f"V{shape.run}")
    here, units = source.host_view(run, counts, tuple(axis.source_stride for axis in shape.axes))
    there, places = destination.host_view(run, counts, tuple(axis.destination_stride for axis in shape.axes))
    there[places] = here[units]


def _convert_on_host(
    shape: Shape, conversion: Conversion, source: _Side, destination: _Side, scales: NDArray[np.float32]
) -> None:
    """Convert with a lookup table: for source types of one or two bytes."""
    counts = (*(axis.steps for axis in shape.axes), shape.run)
    sizes = shape.element_bytes
    read, write = (np.dtype(f"u{size}") for size in sizes)
    here, units = source.host_view(read, counts, (*(axis.source_stride for axis in shape.axes), sizes[0]))
    there, places = destination.host_view(write, counts, (*(axis.destination_stride for axis in shape.axes), sizes[1]))
    codes = here[units]
    if len(scales) > 1:
        codes = codes + (_scale_rows(shape) << (8 * sizes[0]))
    there[places] = _all_codes(conversion, scales.tobytes())[codes]


@lru_cache(maxsize=1024)
def _all_codes(conversion: Conversion, scales: bytes) -> NDArray[Any]:
    """The converted code of every source code, one scale row after the other: up to 64 Ki codes a row, made once."""
    rows = torch.frombuffer(bytearray(scales), dtype=torch.float32).view(-1, 2, 1)
    bits = 8 * conversion.source.num_bytes
    codes = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1)).roll(1 << (bits - 1)).to(_BY_BYTES[bits // 8])
    converted = convert(codes.repeat(len(rows), 1), conversion, rows[:, 0], rows[:, 1])
    return np.asarray(converted.view(-1).numpy().view(f"u{conversion.destination.num_bytes}"))


def _scale_rows(shape: Shape) -> NDArray[np.int64]:
    """The row of scales of every combination of axis indices, to be broadcast: `[1, *axes or 1, 1]`."""
    rows = np.zeros(1, dtype=np.int64)
    for axis in shape.axes:
        rows = rows[..., None] + (np.arange(axis.steps) if axis.scaled else np.zeros(1, dtype=np.int64))
    return rows[..., None]


def _convert(
    shape: Shape, conversion: Conversion, source: _Side, destination: _Side, scales: NDArray[np.float32]
) -> None:
    if source.memory.device.type == destination.memory.device.type == "cpu" and conversion.source.num_bytes <= 2:
        _convert_on_host(shape, conversion, source, destination, scales)
        return
    counts = (*(axis.steps for axis in shape.axes), shape.run)
    sizes = shape.element_bytes
    raw = source.read(_BY_BYTES[sizes[0]], counts, (*(axis.source_stride for axis in shape.axes), sizes[0]))
    by_step = torch.from_numpy(scales[_scale_rows(shape)]).to(raw.device)  # […, 2]
    encoded = convert(raw, conversion, by_step[..., 0], by_step[..., 1])
    destination.write(encoded, counts, (*(axis.destination_stride for axis in shape.axes), sizes[1]))


def convert(
    raw: torch.Tensor, conversion: Conversion, source_scale: torch.Tensor, destination_scale: torch.Tensor
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
