"""The lease orders of one step, for this engine's workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress


@dataclass(slots=True)
class LeaseOrders:
    """Lease orders of one step, for the workers."""

    opens: list[LeaseOpen] = field(default_factory=list)
    holds: list[LeaseHold] = field(default_factory=list)
    progress: list[LeaseProgress] = field(default_factory=list)
    completions: list[LeaseHold] = field(default_factory=list)
    ends: list[LeaseEnd] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opens or self.holds or self.progress or self.completions or self.ends)

    def take(self) -> LeaseOrders:
        """All orders; this object is empty then."""
        taken = LeaseOrders(self.opens, self.holds, self.progress, self.completions, self.ends)
        self.opens, self.holds, self.progress, self.completions, self.ends = [], [], [], [], []
        return taken

    def withdraw(self, slot: int) -> bool:
        """Drop what is not sent for the lease of a slot, which is over. Returns whether the workers know of the lease
        all the same, or will: then they must end it."""
        self.progress = [order for order in self.progress if order.slot != slot]
        # A lease's first open has no row. Before it may be those of the slot's earlier lease, which the workers end.
        own = [
            at for at, order in enumerate(self.opens) if order.slot == slot and order.row is None
        ]
        if not own:
            return True
        self.opens = [
            order for at, order in enumerate(self.opens) if order.slot != slot or at < own[-1]
        ]
        return False
