"""A lease, one request's claim on a slot: its transition table, which `ledger.py` executes, and its record.

            open                complete         end (expiry, release)           sent
 INTENDED ───────→ COMPUTING ───────────→ HELD ────────────────────→ ENDING ───────────→ (gone)
     │ abandon         │ abandon            │ sent
     ↓                 ↓                    ↓
   (gone)            (gone)               (gone)

The blocks of a request are freed when every worker has acknowledged the end of its lease.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.orders import LeaseEnd, LeaseHold
from kvferry.protocol.params import Blocks
from kvferry.protocol.transitions import TableEnum


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


# HELD → (gone) without an end: all workers of a consumer have said that they are done, and each worker here has cleared
# its slot by itself. Every other way out of HELD waits in ENDING for the workers: vLLM gives a block away in the step
# that frees it, and a reader that had seen READY would take the next request's bytes for the prompt's.
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
    PREFIX = "prefixes"
    """The first tokens of a prompt that are in the cache anyway, for an engine that has found them: read at once."""


@dataclass(slots=True, eq=False)
class PublishedStream:
    """The part of one lease's prompt that was published under its present epoch.

    Attributes:
        row: where the workers list its blocks.
        tokens: leading tokens that the workers have reported as complete, or will.
        blocks: per cache group the blocks in the row.
    """

    row: int
    tokens: int = 0
    blocks: tuple[Sequence[int], ...] = ()

    def goes_on_with(self, blocks: Sequence[Sequence[int]]) -> bool:
        """True if these blocks of the request, per cache group, begin with the published ones."""
        pairs = zip(self.blocks, blocks, strict=False)
        return all(now[: len(published)] == published for published, now in pairs)


_NO_SLOT = LeaseName(slot=-1, epoch="")


@dataclass(slots=True, eq=False)
class ProducerLease:
    """All that is known of one request's lease.

    Attributes:
        name: its present name in messages and orders; without a slot while INTENDED.
        origin: its first name, by which consumers know it as long as it lasts. `name` has another epoch if its stream
            restarted.
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
        """True if the lease has references on the request's blocks."""
        return self.state in (LeaseState.HELD, LeaseState.ENDING)

    def hold_order(self, blocks: Blocks) -> LeaseHold:
        """The order to the workers that its blocks are held; those that must copy them get them."""
        return LeaseHold(
            request_id=self.request_id,
            slot=self.slot,
            epoch=self.name.epoch,
            blocks=blocks,
        )

    def end_order(self) -> LeaseEnd:
        """The order to the workers to clear its slot."""
        return LeaseEnd(
            request_id=self.request_id, slot=self.slot, epoch=self.name.epoch
        )

    def __str__(self) -> str:
        return f"req={self.request_id} slot={self.slot}"
