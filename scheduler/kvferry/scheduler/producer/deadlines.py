"""Deadlines of held leases: a heap, so that leases which do not expire cost a step nothing."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from kvferry.protocol.ids import Epoch
from kvferry.scheduler.producer.lease import Lease, LeaseState

SPARE_ENTRIES = 64
"""So many entries of ended leases never cause a rebuild."""


class Deadlines:
    """Held leases by deadline.

    A renewal changes only the lease: its entry is moved when the old deadline is reached. Entries of ended leases stay
    until they are more than half: the heap has at most `2 * len(leases) + SPARE_ENTRIES` entries.

    Args:
        leases: every lease that is not over, by slot; the owner changes it, and calls `trim` after a removal.
    """

    def __init__(self, leases: Mapping[int, Lease]) -> None:
        self._leases = leases
        self._heap: list[tuple[float, int, Epoch]] = []

    def __len__(self) -> int:
        """The number of entries, including those of ended leases."""
        return len(self._heap)

    def watch(self, lease: Lease) -> None:
        """Add a held lease, for `due`."""
        heapq.heappush(self._heap, (lease.deadline_s, lease.slot, lease.epoch))

    def may_be_due(self, clock_s: float) -> bool:
        """Whether any entry's deadline has passed; the lease may have been renewed or ended since."""
        return bool(self._heap) and self._heap[0][0] <= clock_s

    def due(self, clock_s: float) -> list[Lease]:
        """Held leases that have expired; each is returned once."""
        due = []
        while self._heap and self._heap[0][0] <= clock_s:
            _, slot, epoch = heapq.heappop(self._heap)
            lease = self._leases.get(slot)
            if lease is None or lease.epoch != epoch or lease.state is not LeaseState.HELD:
                continue
            if lease.deadline_s > clock_s:
                self.watch(lease)
            else:
                due.append(lease)
        return due

    def trim(self) -> None:
        """Rebuild the heap if most of its entries are of ended leases; O(1) per entry, amortised."""
        if len(self._heap) > 2 * len(self._leases) + SPARE_ENTRIES:
            held = [lease for lease in self._leases.values() if lease.state is LeaseState.HELD]
            self._heap = [(lease.deadline_s, lease.slot, lease.epoch) for lease in held]
            heapq.heapify(self._heap)

    def watched(self) -> set[tuple[int, Epoch]]:
        """Slots and epochs that have an entry, for `check_integrity`."""
        return {(slot, epoch) for _, slot, epoch in self._heap}
