"""The staging buffer of a worker, and the sources that are prepared for reading through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.plan.staged_layout import Placement
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
from kvferry.worker.relayout.shape import CopyAxis, ElementConversion, ElementType, Shape
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

    def __init__(self, caches: KvCaches, capacity: int, *, on_host: bool = False) -> None:
        self.pool = StagingPool(capacity)
        device = HOST if on_host else caches.device
        self._memory = HostMemory(capacity, caches.device) if on_host else None
        self._buffer = self._memory.tensor if self._memory else device.empty(capacity)
        self._where = KvCaches((self._buffer,), (), device)
        try:
            self.relayout = relayout_for([self._buffer], caches.storages, caches.device)
        except BaseException:
            self.unpin()
            raise

    def unpin(self) -> None:
        """Undo the pinning of a buffer in host memory, once nothing uses it any more. Idempotent."""
        if self._memory is not None:
            self._memory.unpin()

    @property
    def longest_run(self) -> int:
        """Bytes of the longest run that is staged: a wave of two runs contains one aligned chunk wherever it begins."""
        return self.pool.largest_wave // 2

    @property
    def address(self) -> int:
        """Address of the buffer's first byte."""
        return self._buffer.data_ptr()

    def region(self) -> Region:
        """The memory to register."""
        return Region(self.address, self.pool.capacity, self._where.kind, self._where.device_index)

    def prepare(self, fabric: Fabric, run_bytes: int) -> LocalDescriptors:
        """Descriptors of the buffer in chunks of `run_bytes`: descriptor `i` is the chunk at `i·run_bytes`."""
        row = (
            self.address,
            run_bytes,
            self._where.device_index,
            run_bytes,
            self.pool.capacity // run_bytes,
        )
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
    if device.is_cuda:
        from kvferry.worker.relayout.triton_relayout import TABLE_BYTES, TritonRelayout, room_for

        table_bytes = TABLE_BYTES if largest is None else room_for(largest)
        return TritonRelayout(sources, destinations, device, table_bytes=table_bytes)
    return ReferenceRelayout(sources, destinations)


def chunks_of(wave: Wave, run_bytes: int) -> tuple[int, int]:
    """The chunks of `run_bytes` that lie in a wave: the first one's number, and how many there are."""
    first = -(-wave.start // run_bytes)
    return first, max(0, wave.stop // run_bytes - first)


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
    def of(
        cls, table: SourceTable, chunks: LocalDescriptors, remote: RemoteDescriptors, address: int
    ) -> PreparedSource:
        """A source that is read into the staging buffer at `address`."""
        placements = table.source.placements
        placed = [(piece, shape) for shape, one in enumerate(placements) for piece in one.pieces]
        placed.sort(key=lambda one: one[0].run)
        rows = [
            (address + one.offset, one.local_base, shape, scale)
            for scale, (one, shape) in enumerate(placed)
        ]
        pieces = Pieces(
            tuple(_shape(one, table.run_bytes) for one in placements),
            np.array(rows, dtype=np.int64).reshape(-1, 4),
            np.array([one.scales for one, _ in placed], dtype=np.float32).reshape(-1, 2),
        )
        return cls(
            table, chunks, remote, pieces, np.array([one.run for one, _ in placed], dtype=np.int64)
        )

    def wave_table(self, units: SourceUnits, window: Window, first_chunk: int) -> WaveTable:
        """The table that puts a window in place; its first chunk is number `first_chunk` of the staging buffer."""
        first, stop = units.source_unit.searchsorted((window.first_unit, window.stop_unit))
        which = slice(*self.runs.searchsorted((window.first_run, window.stop_run)))
        # Units are numbered from the source's first unit, so each run is shifted to the chunk that unit 0 would have.
        shifts = (self.runs[which] - window.first_run) * window.units + (
            first_chunk - window.first_unit
        )
        ranges = ((0, int(stop - first)),) * len(self.pieces.shapes)
        return WaveTable(self.pieces, ranges, units.places[first:stop], shifts, which)


def _shape(placement: Placement, run_bytes: int) -> Shape:
    """A placement's shape; a source block is a chunk of the staging buffer."""
    return Shape.of(
        [CopyAxis(axis.steps, axis.remote_stride, axis.local_stride) for axis in placement.axes],
        placement.run,
        source_unit_stride=(run_bytes, placement.source_position_stride),
        destination_unit_stride=(placement.block_stride, placement.position_stride),
        conversion=ElementConversion(*map(ElementType, placement.dtypes))
        if placement.dtypes is not None
        else None,
    )
