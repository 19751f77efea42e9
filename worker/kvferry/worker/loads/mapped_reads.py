"""The copies of one load from its producer's mapped memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.tokens import TokenMap
from kvferry.worker.device import DeviceMark
from kvferry.worker.loads.results import LoadRecord
from kvferry.worker.peers.mapped_route import MappedRoute
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.wave_table import WaveTable


@dataclass(eq=False)
class MappedReads:
    """Copies from the producer's mapped memory into the request's blocks.

    Attributes:
        record: of the load.
        changes: grows with every launch that has ended.
    """

    record: LoadRecord
    changes: int = 0
    # Those of all launches. They keep the maps that they read through, even if their producer is lost meanwhile.
    _relayouts: dict[Relayout, None] = field(default_factory=dict)
    # Of the last launch. All launches of a worker are on one stream, so it is reached after the others.
    _mark: DeviceMark | None = None

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
                self.record.planned_bytes += num_bytes
                self.record.mapped_bytes += num_bytes
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
