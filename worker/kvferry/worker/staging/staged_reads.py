"""The staged reads of one load: wave by wave through the pool; one wave is read while the last is put in place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvferry.plan.waves import SourceUnits, Window, next_window, window_reads
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.port import Transfer, TransferState, TransferTelemetry
from kvferry.worker.fabric.reads import FabricReader, Reads
from kvferry.worker.relayout.wave_table import MAX_UNITS, WaveTable
from kvferry.worker.staging.buffer import PreparedSource, Staging, chunks_in_wave
from kvferry.worker.staging.pool import WAVES_PER_LOAD, Wave

MAX_WAVE_BYTES = 32 << 20
"""Bytes of one wave, at most, however large the pool is, unless a single run has more."""


class StagedFigures(Protocol):
    """What staged reads add to the record of their load: `LoadRecord`, which is a layer above them."""

    request_id: str
    planned_bytes: int
    planned_descriptors: int
    staged_bytes: int
    waves: int
    relayout_s: float

    def count(self, telemetry: TransferTelemetry | None) -> None:
        """Add what the fabric has measured of a read that has ended."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A wave from its read to its last byte in place.

    Attributes:
        reads: the reads that may still write into the wave.
        transfer: its read; None once that has ended.
        table: the table that puts its bytes in place.
        mark: reached when they are in place; None before the relayout has begun.
        read_s: when its read ended.
    """

    wave: Wave
    reads: Reads
    transfer: Transfer | None = None
    table: WaveTable | None = None
    mark: DeviceMark | None = None
    read_s: float = 0.0
    quarantined: bool = False

    def is_in_place(self) -> bool:
        return self.mark is not None and self.mark.reached()

    def is_safe(self) -> bool:
        """True if no read can write into the wave any more, and no relayout reads from it."""
        has_ended = self.reads.settle()
        return has_ended and (self.mark is None or self.mark.reached())


class _Cursor:
    """The position of a load: the sources that are left, and the last window of the first of them.

    True as long as a source is left.
    """

    def __init__(self, sources: Iterable[tuple[PreparedSource, SourceUnits]]) -> None:
        self._left = deque((source, units) for source, units in sources if len(units))
        self._last: Window | None = None

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def source(self) -> tuple[PreparedSource, SourceUnits]:
        """The source that is being read."""
        return self._left[0]

    @property
    def chunks_left(self) -> int:
        """Chunks of this source that have not been read, rounded up to whole units."""
        source, units = self.source
        last = self._last
        if last is None:
            units_left = len(units)
        elif last.stop_run == source.table.runs:
            units_left = len(units) - last.stop_unit
        else:
            # The window ended within the runs of its units.
            units_left = len(units) - last.first_unit
        return source.table.runs * units_left

    def take_window(self, chunks: int) -> Window:
        """The next window of at most `chunks` chunks."""
        source, units = self.source
        window = next_window(source.table.runs, len(units), self._last, chunks)
        if window is None:
            raise RuntimeError("a source without units is never the first one")
        self._last = window
        if next_window(source.table.runs, len(units), window, 1) is None:
            self._left.popleft()
            self._last = None
        return window


class StagedReads:
    """See the module. Used on the transfer thread only.

    Args:
        record: of the load; the pool knows it by its request.
        peer: for the pool's fairness.

    Attributes:
        changes: waves begun, waves read and waves in place, counted together: it grows with any progress.
    """

    def __init__(
        self, reader: FabricReader, staging: Staging, record: StagedFigures, peer: str
    ) -> None:
        self.changes = 0
        self._reader = reader
        self._staging = staging
        self._record = record
        self._peer = peer
        self._flights: list[_Flight] = []

    def steps(
        self, sources: Iterable[tuple[PreparedSource, SourceUnits]]
    ) -> Generator[None, None, None]:
        """Read and relay out every source; ends when every byte is in place.

        Raises:
            FabricError: a read failed; poll `settle` until the waves are safe.
        """
        cursor = _Cursor(sources)
        while cursor or self._flights:
            self._begin_waves(cursor)
            for flight in self._flights:
                self._advance(flight)
            self._finish([flight for flight in self._flights if flight.is_in_place()])
            if cursor or self._flights:
                yield

    @property
    def lacks_room(self) -> bool:
        """True if it waits for its first wave, and failed reads keep the room that it needs."""
        return self._staging.pool.lacks_room(self._record.request_id)

    def progress(self) -> int:
        """Grows with its own progress, and while it waits for its first wave with that of others."""
        pool = self._staging.pool
        waits_for_others = (
            pool.is_waiting(self._record.request_id) and not self.lacks_room
        )
        # A load in a queue that moves has not failed: its deadline counts from the last move.
        if waits_for_others:
            return self.changes + pool.given_back
        return self.changes

    def settle(self) -> bool:
        """Give back the waves that are safe, and quarantine the others; raises nothing.

        Returns:
            True if none is left: nothing writes into the request's blocks.
        """
        # It may still wait for its first wave; loads behind it would wait for ever.
        self._staging.pool.withdraw(self._record.request_id)
        self._give_back([flight for flight in self._flights if flight.is_safe()])
        for flight in self._flights:
            if not flight.quarantined:
                self._staging.pool.quarantine(flight.wave)
                flight.quarantined = True
        return not self._flights

    def waves(self) -> list[Wave]:
        """The waves that it holds."""
        return [flight.wave for flight in self._flights]

    def transfers(self) -> int:
        """Transfers that have not been given back."""
        return sum(len(flight.reads) for flight in self._flights)

    def _begin_waves(self, cursor: _Cursor) -> None:
        """Begin as many waves as this load may hold and the pool gives."""
        while cursor and len(self._flights) < WAVES_PER_LOAD:
            if not self._try_begin(cursor):
                return

    def _try_begin(self, cursor: _Cursor) -> bool:
        """Post the read of the next window, unless the pool has no room now."""
        source, units = cursor.source
        run_bytes = source.table.run_bytes
        # Chunks are aligned in the buffer and waves are not, so a wave needs up to one run more
        # than it reads, and two runs to read one.
        least = 2 * run_bytes
        wanted = min((cursor.chunks_left + 1) * run_bytes, max(least, MAX_WAVE_BYTES))
        wave = self._staging.pool.try_take(
            self._record.request_id, self._peer, wanted, at_least=least
        )
        if wave is None:
            return False
        flight = _Flight(wave, Reads(self._reader))
        # Before anything can raise: the wave must be given back, whatever happens.
        self._flights.append(flight)
        first_chunk, chunks = chunks_in_wave(wave, run_bytes)
        window = cursor.take_window(min(chunks, _max_chunks(source, units)))
        flight.table = source.wave_table(units, window, first_chunk)
        local = np.arange(first_chunk, first_chunk + window.chunks, dtype=np.int32)
        remote = window_reads(source.table, units, window)
        flight.transfer = flight.reads.post(source.chunks, local, source.remote, remote)
        window_bytes = window.chunks * run_bytes
        self._record.planned_bytes += window_bytes
        self._record.staged_bytes += window_bytes
        self._record.planned_descriptors += window.chunks
        self._record.waves += 1
        self.changes += 1
        return True

    def _advance(self, flight: _Flight) -> None:
        fabric = self._reader.fabric
        transfer = flight.transfer
        if transfer is not None and fabric.poll(transfer) is TransferState.DONE:
            self._record.count(fabric.telemetry(transfer))
            flight.transfer = None
            flight.read_s = time.monotonic()
            flight.reads.finished(transfer)
            self.changes += 1
        is_read = flight.transfer is None and flight.table is not None
        if is_read and flight.mark is None:
            self._start_relayout(flight)

    def _start_relayout(self, flight: _Flight) -> None:
        """Begin to put a wave in place; it stays to be begun while too many waves are under way."""
        if flight.table is None:
            raise RuntimeError("a wave whose read was not posted is not put in place")
        try:
            flight.mark = self._staging.relayout.try_start(flight.table)
        except Exception:
            # What was launched before the error still writes into the request's blocks: they stay
            # out of use until the relayout's stream has passed.
            flight.mark = self._staging.relayout.mark()
            raise

    def _finish(self, flights: list[_Flight]) -> None:
        """Give back the waves that are in place."""
        if not flights:
            return
        now_s = time.monotonic()
        self._record.relayout_s += sum(now_s - flight.read_s for flight in flights)
        self.changes += len(flights)
        self._give_back(flights)

    def _give_back(self, flights: list[_Flight]) -> None:
        for flight in flights:
            self._staging.pool.give_back(flight.wave)
            self._flights.remove(flight)


def _max_chunks(source: PreparedSource, units: SourceUnits) -> int:
    """As many chunks of one wave as the rows of its table allow."""
    units_per_chunk = -(-len(units.source_unit) // len(units))
    return source.table.runs * max(1, MAX_UNITS // units_per_chunk)
