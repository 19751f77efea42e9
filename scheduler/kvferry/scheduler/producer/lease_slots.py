"""The slots of the lease table: which are free, and whose lease has each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import Epoch, epoch_to_text
from kvferry.protocol.orders import LeaseOpen
from kvferry.scheduler.producer.lease import ProducerLease


@dataclass(frozen=True, slots=True)
class LeaseSlotsSnapshot:
    """Attributes:
    leases: those that have a slot.
    free: the slots without a lease.
    """

    leases: frozenset[ProducerLease]
    free: tuple[int, ...]


class LeaseSlots:
    """The slots of the lease table: each is free or belongs to exactly one lease. `in` may be used on any thread.

    Args:
        draw_epoch: fresh epochs.
    """

    def __init__(self, count: int, draw_epoch: Callable[[], Epoch]) -> None:
        self.count = count
        self._draw_epoch = draw_epoch
        self._free = list(range(count - 1, -1, -1))
        self._by_name: dict[LeaseName, ProducerLease] = {}

    def __contains__(self, name: LeaseName) -> bool:
        return name in self._by_name

    @property
    def free(self) -> int:
        """The number of slots without a lease."""
        return len(self._free)

    def find(self, name: LeaseName) -> ProducerLease | None:
        """The lease of this name, if there is one."""
        return self._by_name.get(name)

    def take(self, lease: ProducerLease) -> LeaseOpen:
        """Give a lease a free slot and a fresh epoch, and return the order to the workers."""
        slot = self._free.pop()
        lease.name = self._new_name(slot)
        lease.origin = lease.name
        self._by_name[lease.name] = lease
        return LeaseOpen(slot=lease.slot, epoch=lease.name.epoch)

    def renew_epoch(self, lease: ProducerLease) -> None:
        """Give a lease a fresh epoch in its slot; `find` knows it by its first name too."""
        # Not by the names in between: tickets have the first one, so consumers have never had those.
        if lease.name != lease.origin:
            del self._by_name[lease.name]
        lease.name = self._new_name(lease.slot)
        self._by_name[lease.name] = lease

    def give_back(self, lease: ProducerLease) -> None:
        """The lease is over."""
        for name in {lease.name, lease.origin}:
            del self._by_name[name]
        self._free.append(lease.slot)

    def snapshot(self) -> LeaseSlotsSnapshot:
        """The slots now."""
        return LeaseSlotsSnapshot(
            leases=frozenset(self._by_name.values()), free=tuple(self._free)
        )

    def _new_name(self, slot: int) -> LeaseName:
        return LeaseName(slot=slot, epoch=epoch_to_text(self._draw_epoch()))
