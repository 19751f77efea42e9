"""The staging buffer of a worker, and the sources that are prepared for reading through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.plan.staged_layout import Piece, Placement
from kvferry.plan.waves import SourceTable, SourceUnits, Window
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import HOST, Device, HostMemory
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    LocalDescriptors,
    Region,
    RemoteDescriptors,
)
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.reference import ReferenceRelayout
from kvferry.worker.relayout.shape import CopyAxis, ElementConversion, Shape
from kvferry.worker.relayout.wave_table import Pieces, WaveTable
from kvferry.worker.staging.pool import StagingPool, Wave


class Staging:
    """One registered buffer, the pool that allocates its parts, and the relayout that puts the bytes in place.

    Args:
        caches: the destination of the bytes.
        capacity: bytes of the buffer.
        on_host: the buffer is host memory, wherever the caches are, for fabrics that do not reach the device.

    Raises:
        PoolTooSmall: the capacity is not enough for a wave.
        InvalidConfig: there is too little host memory.
    """

    def __init__(
        self, caches: KvCaches, capacity: int, *, on_host: bool = False
    ) -> None:
        self.pool = StagingPool(capacity)
        self._memory: HostMemory | None = None
        if on_host:
            self._memory = HostMemory(capacity, caches.device)
            self._buffer = self._memory.tensor
            self._where = KvCaches((self._buffer,), (), HOST)
        else:
            self._buffer = caches.device.empty(capacity)
            self._where = KvCaches((self._buffer,), (), caches.device)
        try:
            self.relayout = relayout_for([self._buffer], caches.storages, caches.device)
        except BaseException:
            # The start fails, but the engine's process may live on: pinned pages stay pinned.
            self.unpin()
            raise

    def unpin(self) -> None:
        """Undo the pinning of a buffer in host memory, once nothing uses it any more. Idempotent."""
        if self._memory is not None:
            self._memory.unpin()

    @property
    def longest_run(self) -> int:
        """Bytes of the longest run that is staged."""
        # Chunks are counted from the buffer's start, waves begin anywhere: only a wave of two runs
        # contains a whole chunk wherever it begins.
        return self.pool.largest_wave // 2

    @property
    def address(self) -> int:
        """Address of the buffer's first byte."""
        return self._buffer.data_ptr()

    def region(self) -> Region:
        """The memory to register."""
        return Region(
            self.address, self.pool.capacity, self._where.kind, self._where.device_index
        )

    def prepare(self, fabric: Fabric, run_bytes: int) -> LocalDescriptors:
        """Descriptors of the buffer in chunks of `run_bytes`: descriptor `i` is the chunk at `i·run_bytes`."""
        chunks = self.pool.capacity // run_bytes
        row = (self.address, run_bytes, self._where.device_index, run_bytes, chunks)
        return fabric.prepare_local(DescriptorRows.from_tuples(self._where.kind, [row]))


def relayout_for(
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    device: Device,
    largest: WaveTable | None = None,
) -> Relayout:
    """The relayout for a device, ready to be used: kernels are compiled now. Either side may be host memory.

    Args:
        largest: a table of the pieces of all waves, with as many units as any will have; None for the pool's waves.
    """
    if not device.is_cuda:
        return ReferenceRelayout(sources, destinations)
    # Imported here: CPU engines have no Triton.
    from kvferry.worker.relayout.triton_relayout import (
        TABLE_BYTES,
        TritonRelayout,
        room_for,
    )

    table_bytes = TABLE_BYTES
    if largest is not None:
        table_bytes = room_for(largest)
    return TritonRelayout(sources, destinations, device, table_bytes=table_bytes)


def chunks_in_wave(wave: Wave, run_bytes: int) -> tuple[int, int]:
    """The chunks of `run_bytes` that lie in a wave: the first one's number, and how many there are."""
    first_chunk = -(-wave.start // run_bytes)
    stop_chunk = wave.stop // run_bytes
    return first_chunk, max(0, stop_chunk - first_chunk)


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """One source of a peer, ready to be read through the pool.

    Attributes:
        chunks: the staging buffer in chunks of the source's run; descriptor `i` is chunk `i`.
        remote: the producer's rows.
        pieces: the pieces to put in place, as if every run were in chunk 0; a wave shifts them to its chunks.
        runs: the run of each piece, ascending.
    """

    table: SourceTable
    chunks: LocalDescriptors
    remote: RemoteDescriptors
    pieces: Pieces
    runs: NDArray[np.int64]

    @classmethod
    def at_address(
        cls,
        address: int,
        table: SourceTable,
        chunks: LocalDescriptors,
        remote: RemoteDescriptors,
    ) -> PreparedSource:
        """A source that is read into the staging buffer at `address`."""
        placements = table.source.placements
        # By run, so that the pieces of a window, which is a range of runs, are a slice.
        placed = [
            (piece, shape)
            for shape, placement in enumerate(placements)
            for piece in placement.pieces
        ]
        placed.sort(key=_run_of_placed)
        rows = [
            (address + piece.offset, piece.local_base, shape, scale)
            for scale, (piece, shape) in enumerate(placed)
        ]
        scales = [piece.scales for piece, _ in placed]
        runs = [piece.run for piece, _ in placed]
        pieces = Pieces(
            tuple(_shape(placement, table.run_bytes) for placement in placements),
            np.array(rows, dtype=np.int64).reshape(-1, 4),
            np.array(scales, dtype=np.float32).reshape(-1, 2),
        )
        return cls(table, chunks, remote, pieces, np.array(runs, dtype=np.int64))

    def wave_table(
        self, units: SourceUnits, window: Window, first_chunk: int
    ) -> WaveTable:
        """The table that puts a window in place; its first chunk is number `first_chunk` of the staging buffer."""
        first_place, stop_place = units.source_unit.searchsorted(
            (window.first_unit, window.stop_unit)
        )
        first_piece, stop_piece = self.runs.searchsorted(
            (window.first_run, window.stop_run)
        )
        selected = slice(first_piece, stop_piece)
        # A window's chunks lie run by run, the units of one run side by side. Units are numbered
        # from the source's first unit, so each run is shifted to the chunk that unit 0 would have.
        runs_before = self.runs[selected] - window.first_run
        shifts = runs_before * window.units + (first_chunk - window.first_unit)
        every_place = (0, int(stop_place - first_place))
        return WaveTable(
            self.pieces,
            ranges=(every_place,) * len(self.pieces.shapes),
            units=units.places[first_place:stop_place],
            shifts=shifts,
            selected=selected,
        )


def _run_of_placed(placed: tuple[Piece, int]) -> int:
    piece, _ = placed
    return piece.run


def _shape(placement: Placement, run_bytes: int) -> Shape:
    """A placement's shape; a source block is a chunk of the staging buffer."""
    return Shape.from_axes(
        [CopyAxis.of_plan(axis) for axis in placement.axes],
        placement.run,
        source_unit_stride=(run_bytes, placement.source_position_stride),
        destination_unit_stride=(placement.block_stride, placement.position_stride),
        conversion=ElementConversion.of_plan(placement.dtypes),
    )
