"""The relayout as one launch of a Triton kernel per wave, on a CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from kvferry.worker.device import DeviceMark, clock_for
from kvferry.worker.relayout.device_table import DeviceTable
from kvferry.worker.relayout.element_types import Conversion, ElementType
from kvferry.worker.relayout.kernel import TILE, launch_relayout, tile_of
from kvferry.worker.relayout.memory import Memory
from kvferry.worker.relayout.shape import Shape
from kvferry.worker.relayout.wave_table import InvalidTable, WaveTable

TABLE_BYTES = 2 << 20
TABLES = 16
_LEAST_TABLE_BYTES = 16 << 10


def room_for(largest: WaveTable) -> int:
    """Bytes for the table of any wave of as many pieces, units and chunks, without conversions.

    Pieces of one shape can differ in width, and each width (1, 2, 4, 8, 16) has a row.
    """
    compiled = DeviceTable.of(largest, TILE)
    return max(_LEAST_TABLE_BYTES, compiled.num_bytes + 2 * 5 * compiled.shapes.nbytes)


class TritonRelayout:
    """The relayout in Triton.

    Everything that allocates, compiles or waits happens here, once, when the caches are registered. Under Triton's
    interpreter it runs on the CPU, slowly: for tests.

    Args:
        sources: what waves are read from, e.g. the staging buffer. Pinned host memory is fine.
        destinations: what they are written to, e.g. the caches.
        device: that runs the kernel; by default the one of the destinations.
        table_bytes: largest table of one wave.
        tables: waves that may be on their way at once.
        tile: chunks that one program moves.
    """

    def __init__(
        self,
        sources: Iterable[torch.Tensor],
        destinations: Iterable[torch.Tensor],
        device: torch.device | None = None,
        *,
        table_bytes: int = TABLE_BYTES,
        tables: int = TABLES,
        tile: int = TILE,
    ) -> None:
        destinations = tuple(destinations)
        device = device or destinations[0].device
        self._sources = Memory(sources, "source")
        self._destinations = Memory(destinations, "destination")
        self._device = device
        self._clock = clock_for(device)
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._device_tables = torch.empty(tables, table_bytes, dtype=torch.uint8, device=device)
        self._host_tables = torch.empty(tables, table_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self._marks: list[DeviceMark | None] = [None] * tables
        self._tile = tile
        self._launches = 0
        self._warm_up()

    @property
    def launches(self) -> int:
        """Kernels launched for waves so far; the warm-up's are not counted."""
        return self._launches

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        """Begin to put a wave in place. See `Relayout.try_start`.

        Raises:
            InvalidTable: also where the table is larger than `table_bytes`.
        """
        extents = table.extents()
        self._sources.allocations_of(extents.source_start, extents.source_stop)
        self._destinations.allocations_of(extents.destination_start, extents.destination_stop)
        slot = next((i for i, mark in enumerate(self._marks) if mark is None or mark.reached()), None)
        if slot is None:
            return None
        return self._launch(table, slot)

    def _launch(self, table: WaveTable, slot: int) -> DeviceMark:
        converts = any(shape.conversion is not None for shape in table.shapes)
        tile = tile_of(self._tile, converts)
        compiled = DeviceTable.of(table, tile)
        room = self._host_tables.shape[1]
        if compiled.num_bytes > room:
            raise InvalidTable(f"a wave's table has {compiled.num_bytes} bytes; expected at most {room}")
        host, there = self._host_tables[slot], self._device_tables[slot]
        with self._on_stream():
            if len(compiled.programs):
                compiled.write(host.numpy())
                there[: compiled.num_bytes].copy_(host[: compiled.num_bytes], non_blocking=True)
                programs, pieces, shapes, units, scales = (there[offset:] for offset in compiled.offsets[:-1])
                launch_relayout(
                    programs=programs.view(torch.int32),
                    pieces=pieces.view(torch.int64),
                    shapes=shapes.view(torch.int64),
                    units=units.view(torch.int32),
                    scales=scales.view(torch.float32),
                    num_programs=len(compiled.programs),
                    converts=converts,
                    tile=tile,
                )
                self._launches += 1
            mark = self._clock.mark()
        self._marks[slot] = mark
        return mark

    def _warm_up(self) -> None:
        """Compile both variants, by moving bytes of the table's own memory."""
        scratch = torch.zeros(64, dtype=torch.uint8, device=self._device)
        address = scratch.data_ptr()
        conversion = Conversion(ElementType.FLOAT32, ElementType.FLOAT8_E4M3)
        for shape in (Shape(axes=(), run=16), Shape(axes=(), run=4, conversion=conversion)):
            table = WaveTable(
                (shape,),
                np.array([[address, address + 32, 0, 0, 1, 0]], dtype=np.int64),
                np.zeros((1, 4), dtype=np.int32),
            )
            self._launch(table, 0)
        if self._stream is not None:
            self._stream.synchronize()
        self._launches = 0

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
