"""The mapped reads of one load: from the producer's memory straight into the caches, launch by launch."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.tokens import TokenMap
from kvferry.worker.device import DeviceMark
from kvferry.worker.loads.results import LoadRecord
from kvferry.worker.peers.mapped_route import MappedRoute
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.wave_table import WaveTable


class MappedReads:
    """See the module. Used on the transfer thread only.

    Attributes:
        changes: grows with every launch that has ended.
    """

    def __init__(self, record: LoadRecord) -> None:
        self.changes = 0
        self._record = record
        # Those of all launches. They keep the maps that they read through, even if their producer is lost meanwhile.
        self._relayouts: dict[Relayout, None] = {}
        # Of the last launch. All launches of a worker are on one stream, so it is reached after the others.
        self._mark: DeviceMark | None = None

    def steps(
        self, routes: Iterable[MappedRoute], units: Mapping[TokenMap, UnitPairs]
    ) -> Generator[None, None, None]:
        """Copy these units; ends when every byte is in place.

        Raises:
            InvalidTable: a copy would leave the memory that is mapped, or the caches.
        """
        is_first = True
        for route in routes:
            for table, num_bytes in route.tables(units):
                if not is_first:
                    # One launch may take milliseconds of this thread, so other loads have their turn between two.
                    yield
                is_first = False
                yield from self._launch(route.relayout, table)
                self._record.planned_bytes += num_bytes
                self._record.mapped_bytes += num_bytes
                self.changes += 1
        while not self.settle():
            yield

    def _launch(
        self, relayout: Relayout, table: WaveTable
    ) -> Generator[None, None, None]:
        self._relayouts[relayout] = None
        try:
            mark = relayout.try_start(table)
            # The device is behind: all tables are in use.
            while mark is None:
                yield
                mark = relayout.try_start(table)
        except Exception:
            # What was launched before the error still writes.
            self._mark = relayout.mark()
            raise
        self._mark = mark

    def settle(self) -> bool:
        """Whether no launch writes into the request's blocks any more."""
        return self._mark is None or self._mark.reached()
