"""A lease, one request's claim on a slot: its transition table, which `ledger.py` executes, its record, its orders.

            open                complete              announce               sent
 INTENDED ───────→ COMPUTING ───────────→ COMPLETE ───────────→ HELD ────────────────→ (gone)
     │ abandon         │ abandon                                 │ end (expiry, release)
     ↓                 ↓                                         ↓          sent
   (gone)            (gone)                                    ENDING ───────────────→ (gone)

The blocks of a request are freed when every worker has acknowledged the end of its lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen
from kvferry.scheduler.state import TableEnum


class LeaseState(TableEnum):
    """States of a lease."""

    INTENDED = "intended"
    """The request has arrived, and gets a slot when it is scheduled."""
    COMPUTING = "computing"
    """The request runs; the slot is COMPUTING in every worker's lease table."""
    COMPLETE = "complete"
    """Its blocks are complete, or will be when the next step ends, and are kept; not announced to the workers yet."""
    HELD = "held"
    """Announced to the workers; the deadline counts once the request has ended."""
    ENDING = "ending"
    """Reads are not allowed any more; the workers clear their slots and report."""


class LeaseEvent(TableEnum):
    """Events of a lease."""

    OPEN = "open"
    COMPLETE = "complete"
    ABANDON = "abandon"
    ANNOUNCE = "announce"
    END = "end"
    SENT = "sent"


LEASE_TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState | None] = {
    (LeaseState.INTENDED, LeaseEvent.OPEN): LeaseState.COMPUTING,
    (LeaseState.INTENDED, LeaseEvent.ABANDON): None,
    (LeaseState.COMPUTING, LeaseEvent.COMPLETE): LeaseState.COMPLETE,
    (LeaseState.COMPUTING, LeaseEvent.ABANDON): None,
    (LeaseState.COMPLETE, LeaseEvent.ANNOUNCE): LeaseState.HELD,
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
class Lease:
    """All that is known of one request's lease.

    Attributes:
        name: its name in messages and orders; without a slot while INTENDED.
        is_running: whether its request has not ended.
        held_s: when it was held and the request had ended, on the ledger's clock; until then when it was announced.
        deadline_s: on the same clock; meaningful while HELD, if the request has ended.
        claimed_until_s: on the same clock; until then a consumer waits for it, since it has renewed the lease.
        block_ids: the request's blocks, each once, on which the lease has a reference; () until COMPLETE.
        acks: workers that have acknowledged its end.
        ended_by: why the lease ends (`release`, `expired`, …), set when that is decided.
    """

    request_id: str
    use: LeaseUse = LeaseUse.PROMPT
    state: LeaseState = LeaseState.INTENDED
    name: LeaseName = _NO_SLOT
    is_running: bool = True
    held_s: float = 0.0
    deadline_s: float = 0.0
    claimed_until_s: float = 0.0
    block_ids: tuple[int, ...] = ()
    acks: set[int] = field(default_factory=set)
    ended_by: str = ""

    @property
    def slot(self) -> int:
        return self.name.slot

    @property
    def keeps_blocks(self) -> bool:
        """Whether the lease has references on the request's blocks."""
        return self.state not in (LeaseState.INTENDED, LeaseState.COMPUTING)

    @property
    def is_readable(self) -> bool:
        """Whether it is held and has not ended."""
        return self.state is LeaseState.HELD and not self.ended_by

    def end_order(self) -> LeaseEnd:
        """The order to the workers to clear its slot."""
        return LeaseEnd(request_id=self.request_id, slot=self.slot, epoch=self.name.epoch)

    def __str__(self) -> str:
        return f"req={self.request_id} slot={self.slot}"


@dataclass(slots=True)
class LeaseOrders:
    """Lease orders of one step, for the workers."""

    ends: list[LeaseEnd] = field(default_factory=list)
    opens: list[LeaseOpen] = field(default_factory=list)
    holds: list[LeaseHold] = field(default_factory=list)
    completions: list[LeaseHold] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ends or self.opens or self.holds or self.completions)
