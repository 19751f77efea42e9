"""A lease, one request's claim on a slot: its transition table, which `ledger.py` executes, its record, its orders.

            open                complete         end (expiry, release)           sent
 INTENDED ───────→ COMPUTING ───────────→ HELD ────────────────────→ ENDING ───────────→ (gone)
     │ abandon         │ abandon            │ sent
     ↓                 ↓                    ↓
   (gone)            (gone)               (gone)

The blocks of a request are freed when every worker has acknowledged the end of its lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import Epoch, epoch_to_text
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress
from kvferry.protocol.params import Blocks
from kvferry.scheduler.producer.streams import PublishedStream
from kvferry.scheduler.state import TableEnum

SCAN_S = 10e-6
"""Wait per held lease until deadlines are checked again: a hundred times what the check costs."""


class LeaseState(TableEnum):
    """States of a lease."""

    INTENDED = "intended"
    """The request has arrived, and gets a slot when it is scheduled."""
    COMPUTING = "computing"
    """The request runs; the slot is COMPUTING in every worker's lease table."""
    HELD = "held"
    """Its blocks are complete, or will be when the next step ends, and are kept; the deadline counts once the request
    has ended, or is preempted."""
    ENDING = "ending"
    """Reads are not allowed any more; the workers clear their slots and report."""


class LeaseEvent(TableEnum):
    """Events of a lease."""

    OPEN = "open"
    COMPLETE = "complete"
    ABANDON = "abandon"
    END = "end"
    SENT = "sent"


LEASE_TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState | None] = {
    (LeaseState.INTENDED, LeaseEvent.OPEN): LeaseState.COMPUTING,
    (LeaseState.INTENDED, LeaseEvent.ABANDON): None,
    (LeaseState.COMPUTING, LeaseEvent.COMPLETE): LeaseState.HELD,
    (LeaseState.COMPUTING, LeaseEvent.ABANDON): None,
    (LeaseState.HELD, LeaseEvent.END): LeaseState.ENDING,
    (LeaseState.HELD, LeaseEvent.SENT): None,
    (LeaseState.ENDING, LeaseEvent.SENT): None,
}


class LeaseUse(TableEnum):
    """The use of a lease; the value is the prefix of the names of its counters."""

    PROMPT = "leases"
    """A prompt that was prefilled here, for the engine that decodes it: read soon, or never."""
    TURN = "turns"
    """A prompt and its answer decoded here, for the prefill of the conversation's next turn: at an unknown time."""


_NO_SLOT = LeaseName(slot=-1, epoch="")


@dataclass(slots=True, eq=False)
class ProducerLease:
    """All that is known of one request's lease.

    Attributes:
        name: its present name in messages and orders; without a slot while INTENDED.
        origin: its first name, which is valid as long as the lease; `name` has another epoch if its stream restarted.
        is_running: whether its request has not ended.
        held_s: when it was held and the request had ended, on the ledger's clock; until then when it was held.
        deadline_s: on the same clock; infinite until the request has ended, or is preempted.
        claimed_until_s: on the same clock; until then a consumer waits for it, since it has renewed the lease.
        block_ids: the request's blocks, each once, on which the lease has a reference; () until HELD.
        acks: workers that have acknowledged its end.
        ended_by: why the lease ends (`release`, `expired`, …), set when that is decided.
        stream: of a prompt that is read, or was, while it is computed.
    """

    request_id: str
    use: LeaseUse = LeaseUse.PROMPT
    state: LeaseState = LeaseState.INTENDED
    name: LeaseName = _NO_SLOT
    origin: LeaseName = _NO_SLOT
    is_running: bool = True
    held_s: float = 0.0
    deadline_s: float = math.inf
    claimed_until_s: float = 0.0
    block_ids: tuple[int, ...] = ()
    acks: set[int] = field(default_factory=set)
    ended_by: str = ""
    stream: PublishedStream | None = None

    @property
    def slot(self) -> int:
        return self.name.slot

    @property
    def keeps_blocks(self) -> bool:
        """Whether the lease has references on the request's blocks."""
        return self.state in (LeaseState.HELD, LeaseState.ENDING)

    def hold_order(self, blocks: Blocks) -> LeaseHold:
        """The order to the workers that its blocks are held; those that must copy them get them."""
        return LeaseHold(
            request_id=self.request_id, slot=self.slot, epoch=self.name.epoch, blocks=blocks
        )

    def end_order(self) -> LeaseEnd:
        """The order to the workers to clear its slot."""
        return LeaseEnd(request_id=self.request_id, slot=self.slot, epoch=self.name.epoch)

    def __str__(self) -> str:
        return f"req={self.request_id} slot={self.slot}"


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
        lease.name = lease.origin = self._name(self._free.pop())
        self._by_name[lease.name] = lease
        return LeaseOpen(slot=lease.slot, epoch=lease.name.epoch)

    def renew_epoch(self, lease: ProducerLease) -> None:
        """Give a lease a fresh epoch in its slot. Its first name finds it as well; names in between, which consumers
        have never had, do not."""
        if lease.name != lease.origin:
            del self._by_name[lease.name]
        lease.name = self._name(lease.slot)
        self._by_name[lease.name] = lease

    def give_back(self, lease: ProducerLease) -> None:
        """The lease is over."""
        for name in {lease.name, lease.origin}:
            del self._by_name[name]
        self._free.append(lease.slot)

    def check_integrity(self) -> None:
        """Raises `LocalProtocolError` if a slot is neither free nor leased, or both."""
        leases = set(self._by_name.values())
        if sorted([lease.slot for lease in leases] + self._free) != list(range(self.count)):
            raise LocalProtocolError(
                f"lease table: {len(leases)} leased and {len(self._free)} free of {self.count} slots"
            )

    def _name(self, slot: int) -> LeaseName:
        return LeaseName(slot=slot, epoch=epoch_to_text(self._draw_epoch()))


class Deadlines:
    """Deadlines of held leases whose requests have ended.

    Args:
        lease_s: lifetime of a held lease without a renewal.
        turn_s: the same for a turn's lease.
    """

    def __init__(self, lease_s: float, turn_s: float) -> None:
        self._first_s = {LeaseUse.PROMPT: lease_s, LeaseUse.TURN: turn_s}
        self._next_due_s = math.inf

    def start(self, lease: ProducerLease, clock_s: float) -> None:
        """The time of a lease begins."""
        lease.held_s = clock_s
        lease.deadline_s = max(lease.claimed_until_s, clock_s + self._first_s[lease.use])
        self._next_due_s = min(self._next_due_s, lease.deadline_s)

    def may_be_due(self, clock_s: float) -> bool:
        """Whether a deadline may have passed; its lease may have been renewed or ended since."""
        return clock_s >= self._next_due_s

    def due(self, held: Iterable[ProducerLease], clock_s: float) -> list[ProducerLease]:
        """The held leases whose deadline has passed. A renewal only adds time, so none of the others is due before the
        earliest deadline that is found here."""
        leases = list(held)
        earliest_s = min((x.deadline_s for x in leases if x.deadline_s > clock_s), default=math.inf)
        self._next_due_s = max(earliest_s, clock_s + len(leases) * SCAN_S)
        return [lease for lease in leases if lease.deadline_s <= clock_s]
