"""The lease orders of one step, for this engine's workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress


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
