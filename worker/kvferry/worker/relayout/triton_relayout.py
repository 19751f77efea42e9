"""The relayout as one launch of a Triton kernel per wave, on a CUDA stream of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.device import Device, DeviceMark
from kvferry.worker.relayout.device_table import (
    SECTION_ALIGNMENT,
    UNIT_COLUMNS,
    DevicePieces,
    DeviceTable,
)
from kvferry.worker.relayout.kernel import TILE, launch_relayout, tile_of
from kvferry.worker.relayout.port import Allocation, Bounds, Memory, OncePerPieces
from kvferry.worker.relayout.shape import ElementConversion, ElementType, Shape
from kvferry.worker.relayout.wave_table import (
    MAX_UNITS,
    InvalidTable,
    Pieces,
    WaveTable,
)

TABLE_BYTES = 2 << 20
"""Bytes of a wave's table, at most; `staging.staged_reads` keeps its waves small enough."""

TABLES = 16
"""Waves that may be under way at once."""

MAX_PROGRAMS = 1024
"""Programs of one launch from mapped memory, unless one unit needs more. Launches of a stream follow one another, so no
more run at once, and the decoder's own kernels find room: an H100 holds 2,112 programs of four warps (132 processors of
2,048 threads), and this is less than half of them. Each moves 16 KiB where runs allow it: 335 MB are 20 launches. *Not
measured on a chip*: neither what it costs the copy nor what it leaves to a decoding step."""

_MIN_TABLE_BYTES = 16 << 10
"""The tables of the warm-up need room too."""


def room_for(largest: WaveTable) -> int:
    """Bytes for the table of any wave of the same pieces with no more units for each of them than `largest`."""
    table = DeviceTable.compile(largest, DevicePieces.compile(largest.pieces), TILE)
    # Shapes that share the rows of their units in this table need not share them in another one.
    unit_rows = sum(stop - first for first, stop in largest.ranges)
    unshared_bytes = unit_rows * table.units.itemsize * UNIT_COLUMNS
    return max(_MIN_TABLE_BYTES, table.num_bytes - table.units.nbytes + unshared_bytes)


@dataclass(slots=True, eq=False)
class _Slot:
    """Space for one wave's table in host memory and on the device, with views of its sections' types.

    Attributes:
        host: pinned, for the copy to the device.
        buffer: the same memory, to be written by numpy.
        device: the space on the device; `int64` and `float32` are views of it.
        mark: reached when the wave of its present table is in place.
    """

    host: torch.Tensor
    buffer: NDArray[np.uint8]
    device: torch.Tensor
    int64: torch.Tensor
    float32: torch.Tensor
    mark: DeviceMark | None = None

    @classmethod
    def with_views(cls, host: torch.Tensor, device: torch.Tensor) -> _Slot:
        return cls(
            host=host,
            buffer=host.numpy(),
            device=device,
            int64=device.view(torch.int64),
            float32=device.view(torch.float32),
        )

    def is_free(self) -> bool:
        return self.mark is None or self.mark.reached()


class TritonRelayout:
    """The relayout in Triton.

    Everything that allocates, compiles or waits happens here, once, when the caches are registered. Under Triton's
    interpreter it runs on the CPU, slowly: for tests.

    Args:
        sources: tensors that waves are read from, e.g. the staging buffer. Pinned host memory is allowed.
        destinations: tensors that they are written to, e.g. the caches.
        device: the device that runs the kernel; by default the one of the destinations.
        table_bytes: largest table of one wave; rounded up, so that all tables are aligned alike.
        tables: waves that may be under way at once.
        tile: chunks that one program moves.
    """

    def __init__(
        self,
        sources: Iterable[torch.Tensor],
        destinations: Iterable[torch.Tensor],
        device: Device | None = None,
        *,
        table_bytes: int = TABLE_BYTES,
        tables: int = TABLES,
        tile: int = TILE,
    ) -> None:
        destinations = tuple(destinations)
        if device is None:
            device = Device(destinations[0].device)
        self._sources = Memory(sources)
        self._destinations = Memory(destinations)
        self._bounds = self._bounds_of_pieces()
        self._compiled = OncePerPieces(DevicePieces.compile)
        self._device = device
        # A stream of its own, so that waves are put in place beside the model's work. A load is
        # reported when this stream has passed, so the model needs no wait of its own.
        self._stream = device.new_stream()
        table_bytes = -(-table_bytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        on_device = device.empty(tables, table_bytes)
        on_host = device.empty_pinned(tables, table_bytes)
        self._slots = [
            _Slot.with_views(host_table, device_table)
            for host_table, device_table in zip(on_host, on_device, strict=True)
        ]
        self._tile = tile
        self.launches = 0
        self._warm_up()

    def reading(self, sources: Iterable[Allocation]) -> TritonRelayout:
        """The same kernels, stream and tables with other sources, which it keeps. Nothing is allocated for it."""
        other = copy.copy(self)
        other._sources = Memory(sources)
        other._bounds = other._bounds_of_pieces()
        other.launches = 0
        return other

    def most_units(self, pieces: Pieces) -> int:
        """See `BoundedRelayout.most_units`: as many as `MAX_PROGRAMS` programs and one table take."""
        if not len(pieces.rows):
            return MAX_UNITS
        tile = tile_of(self._tile, pieces.converts)
        chunks = self._compiled(pieces).chunks
        # The last program of each piece may have little to do.
        programs = max(1, MAX_PROGRAMS - len(chunks))
        # Half of a table's bytes: the other half is enough for programs and pieces. Shapes may each have rows of their
        # own for a unit.
        unit_bytes = UNIT_COLUMNS * 8 * len(pieces.shapes)
        in_table = self._slots[0].buffer.nbytes // 2 // unit_bytes
        by_programs = programs * tile // int(chunks.sum())
        return max(1, min(MAX_UNITS, in_table, by_programs))

    def _bounds_of_pieces(self) -> OncePerPieces[Bounds]:
        # Not a method: a relayout that refers to itself is not freed with its last user, and a peer's memory stays
        # mapped as long.
        return OncePerPieces(
            partial(_bounds_between, self._sources, self._destinations)
        )

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        """Begin to put a wave in place. See `Relayout.try_start`.

        Raises:
            InvalidTable: also where the table is larger than `table_bytes`.
        """
        self._bounds(table.pieces).check(table)
        for slot in self._slots:
            if slot.is_free():
                return self._launch(table, slot)
        return None

    def mark(self) -> DeviceMark:
        """See `Relayout.mark`; the mark is on the stream that waves are launched on."""
        with self._device.on(self._stream):
            return self._device.mark()

    def _launch(self, table: WaveTable, slot: _Slot) -> DeviceMark:
        converts = table.pieces.converts
        tile = tile_of(self._tile, converts)
        compiled = DeviceTable.compile(table, self._compiled(table.pieces), tile)
        num_bytes = compiled.num_bytes
        if num_bytes > len(slot.buffer):
            raise InvalidTable(
                f"a wave's table has {num_bytes} bytes; expected at most {len(slot.buffer)}"
            )
        with self._device.on(self._stream):
            try:
                if len(compiled.programs):
                    compiled.write(slot.buffer)
                    slot.device[:num_bytes].copy_(
                        slot.host[:num_bytes], non_blocking=True
                    )
                    programs, pieces, shapes, units, scales, _ = compiled.offsets
                    launch_relayout(
                        programs=slot.int64[programs // 8 :],
                        pieces=slot.int64[pieces // 8 :],
                        shapes=slot.int64[shapes // 8 :],
                        units=slot.int64[units // 8 :],
                        scales=slot.float32[scales // 4 :],
                        num_programs=len(compiled.programs),
                        converts=converts,
                        tile=tile,
                    )
                    self.launches += 1
            finally:
                # Also where the launch raised: the device may still read the table, so its space
                # must not be used before the device has done with it.
                slot.mark = self._device.mark()
        return slot.mark

    def _warm_up(self) -> None:
        """Compile both variants by moving scratch bytes."""
        scratch = self._device.empty(64)
        # What was launched before may still use the memory that was allocated here.
        self._device.synchronize()
        address = scratch.data_ptr()
        conversion = ElementConversion(ElementType.FLOAT32, ElementType.FLOAT8_E4M3)
        for shape in (
            Shape(axes=(), run=16),
            Shape(axes=(), run=4, conversion=conversion),
        ):
            row = (address, address + 32, 0, 0, 1, 0)
            table = WaveTable.from_rows([shape], [row], [(0, 0, 0, 0)])
            self._launch(table, self._slots[0])
            # The next table is written into the same space.
            if self._stream is not None:
                self._stream.synchronize()
        self.launches = 0


def _bounds_between(sources: Memory, destinations: Memory, pieces: Pieces) -> Bounds:
    return Bounds(pieces, sources, destinations)
