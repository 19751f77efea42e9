"""When held leases run out: a heap, so that a step costs nothing for those whose time is not over."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvferry.protocol.ids import Epoch
from kvferry.scheduler.producer.lease import Lease
from kvferry.scheduler.producer.states import LeaseState


class Deadlines:
    """Leases by the time at which they were last known to run out.

    A renewal changes only the lease: its entry is put off when its old time has come.

    Args:
        find: the lease of a slot, or None.
    """

    def __init__(self, find: Callable[[int], Lease | None]) -> None:
        self._find = find
        self._heap: list[tuple[float, int, Epoch]] = []

    def watch(self, lease: Lease) -> None:
        """From now on `due` looks at it."""
        heapq.heappush(self._heap, (lease.deadline_s, lease.slot, lease.epoch))

    def may_be_due(self, clock_s: float) -> bool:
        """Whether `due` would look at any lease."""
        return bool(self._heap) and self._heap[0][0] <= clock_s

    def due(self, clock_s: float) -> list[Lease]:
        """Held leases whose time is over; each is named once."""
        due = []
        while self._heap and self._heap[0][0] <= clock_s:
            _, slot, epoch = heapq.heappop(self._heap)
            lease = self._find(slot)
            if lease is None or lease.epoch != epoch or lease.state is not LeaseState.HELD:
                continue
            if lease.deadline_s > clock_s:
                self.watch(lease)
            else:
                due.append(lease)
        return due

    def watched(self) -> set[tuple[int, Epoch]]:
        """Slots and epochs that have an entry, for the check of integrity."""
        return {(slot, epoch) for _, slot, epoch in self._heap}
