"""The slots of the lease table: which are free, whose lease has each, and what the workers will be told of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import Epoch, epoch_to_text
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress
from kvferry.scheduler.requests import ProducerLease


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


@dataclass(slots=True)
class LeaseOrders:
    """Lease orders that no step has sent yet."""

    opens: list[LeaseOpen] = field(default_factory=list)
    holds: list[LeaseHold] = field(default_factory=list)
    progress: list[LeaseProgress] = field(default_factory=list)
    completions: list[LeaseHold] = field(default_factory=list)
    ends: list[LeaseEnd] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.opens or self.holds or self.progress or self.completions or self.ends
        )

    def take(self) -> LeaseOrders:
        """All orders; this object is empty then."""
        # The object stays the same one: the ledger and its streams both add to it.
        taken = LeaseOrders(
            self.opens, self.holds, self.progress, self.completions, self.ends
        )
        self.opens = []
        self.holds = []
        self.progress = []
        self.completions = []
        self.ends = []
        return taken

    def withdraw(self, slot: int) -> bool:
        """Drop the orders that were not sent for the lease of a slot, which is over.

        Returns:
            True if an order for this lease was or will be sent; the caller must then send an end.
        """
        self.progress = [order for order in self.progress if order.slot != slot]
        opened_at = self._first_open_of(slot)
        if opened_at is None:
            return True
        # Orders before it stay: they are of an earlier lease of the slot, which the workers know and end.
        kept = self.opens[:opened_at]
        for order in self.opens[opened_at:]:
            if order.slot != slot:
                kept.append(order)
        self.opens = kept
        return False

    def _first_open_of(self, slot: int) -> int | None:
        """The position of the order that opens the present lease of a slot; None if it was sent already."""
        for position in reversed(range(len(self.opens))):
            order = self.opens[position]
            # Only the first open of a lease has no row: the others give a stream that restarted another epoch.
            if order.slot == slot and order.row is None:
                return position
        return None
