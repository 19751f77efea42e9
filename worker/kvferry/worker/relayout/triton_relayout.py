"""The relayout as one launch of a Triton kernel per wave, on a CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
from kvferry.worker.relayout.port import Bounds, Memory, OncePerPieces
from kvferry.worker.relayout.shape import ElementConversion, ElementType, Shape
from kvferry.worker.relayout.wave_table import InvalidTable, WaveTable

TABLE_BYTES = 2 << 20
TABLES = 16
_LEAST_TABLE_BYTES = 16 << 10


def room_for(largest: WaveTable) -> int:
    """Bytes for the table of any wave of the same pieces with no more units for each of them than `largest`."""
    table = DeviceTable.of(largest, DevicePieces.of(largest.pieces), TILE)
    # Shapes that share the rows of their units in this table need not share them in another one.
    apart = (
        sum(stop - first for first, stop in largest.ranges) * table.units.itemsize * UNIT_COLUMNS
    )
    return max(_LEAST_TABLE_BYTES, table.num_bytes + apart - table.units.nbytes)


@dataclass(slots=True, eq=False)
class _Slot:
    """Space for one wave's table in host memory and on the device, with views of its sections' types.

    Attributes:
        mark: reached when the wave of its present table is in place.
    """

    host: torch.Tensor
    buffer: NDArray[np.uint8]
    there: torch.Tensor
    int64: torch.Tensor
    float32: torch.Tensor
    mark: DeviceMark | None = None

    @classmethod
    def of(cls, host: torch.Tensor, there: torch.Tensor) -> _Slot:
        return cls(host, host.numpy(), there, there.view(torch.int64), there.view(torch.float32))


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
        device = device or Device(destinations[0].device)
        own, others = Memory(sources), Memory(destinations)
        self._bounds = OncePerPieces(lambda pieces: Bounds(pieces, own, others))
        self._compiled = OncePerPieces(DevicePieces.of)
        self._device = device
        self._stream = device.new_stream()
        table_bytes = -(-table_bytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        tables_there, tables_here = (
            device.empty(tables, table_bytes),
            device.empty_pinned(tables, table_bytes),
        )
        self._slots = [
            _Slot.of(here, there) for here, there in zip(tables_here, tables_there, strict=True)
        ]
        self._tile = tile
        self.launches = 0
        self._warm_up()

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        """Begin to put a wave in place. See `Relayout.try_start`.

        Raises:
            InvalidTable: also where the table is larger than `table_bytes`.
        """
        self._bounds(table.pieces).check(table)
        slot = next(
            (slot for slot in self._slots if slot.mark is None or slot.mark.reached()), None
        )
        if slot is None:
            return None
        return self._launch(table, slot)

    def mark(self) -> DeviceMark:
        """See `Relayout.mark`; the mark is on the stream that waves are launched on."""
        with self._device.on(self._stream):
            return self._device.mark()

    def _launch(self, table: WaveTable, slot: _Slot) -> DeviceMark:
        converts = table.pieces.converts
        tile = tile_of(self._tile, converts)
        compiled = DeviceTable.of(table, self._compiled(table.pieces), tile)
        if compiled.num_bytes > len(slot.buffer):
            raise InvalidTable(
                f"a wave's table has {compiled.num_bytes} bytes; expected at most {len(slot.buffer)}"
            )
        with self._device.on(self._stream):
            try:
                if len(compiled.programs):
                    compiled.write(slot.buffer)
                    slot.there[: compiled.num_bytes].copy_(
                        slot.host[: compiled.num_bytes], non_blocking=True
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
                slot.mark = (
                    self._device.mark()
                )  # also where the launch raised: the device may still read the table
        return slot.mark

    def _warm_up(self) -> None:
        """Compile both variants by moving scratch bytes."""
        scratch = self._device.empty(64)
        self._device.synchronize()  # what was launched before may still use the memory that was allocated here
        address = scratch.data_ptr()
        conversion = ElementConversion(ElementType.FLOAT32, ElementType.FLOAT8_E4M3)
        for shape in (Shape(axes=(), run=16), Shape(axes=(), run=4, conversion=conversion)):
            table = WaveTable.of([shape], [(address, address + 32, 0, 0, 1, 0)], [(0, 0, 0, 0)])
            self._launch(table, self._slots[0])
            if self._stream is not None:
                self._stream.synchronize()  # the table's space is used again
        self.launches = 0
