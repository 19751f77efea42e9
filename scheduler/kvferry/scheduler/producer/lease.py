"""A lease, one request's claim on a slot, and its states. The table is the truth; `ledger.py` only carries it out.

  open                finish                announce               sent
───────→ COMPUTING ───────────→ FINISHED ───────────→ HELD ────────────────→ (gone)
             │ abandon                                 │ end (expiry, release)
             ↓                                         ↓          sent
           (gone)                                    ENDING ───────────────→ (gone)

The blocks of a request are free when each worker has acknowledged that it is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import Epoch, epoch_to_text
from kvferry.protocol.params import Blocks
from kvferry.scheduler.state.transitions import TableEnum, TransitionTable


class LeaseState(TableEnum):
    """Where a lease is in its life."""

    COMPUTING = "computing"
    """The request runs; every worker's slot says COMPUTING."""
    FINISHED = "finished"
    """The request has ended and its blocks are kept; the workers do not know it yet, so no clock runs."""
    HELD = "held"
    """The workers know; the clock runs."""
    ENDING = "ending"
    """Nobody may read any more; the workers clear their slots and report."""


class LeaseEvent(TableEnum):
    """What can happen to a lease."""

    FINISH = "finish"
    ABANDON = "abandon"
    ANNOUNCE = "announce"
    END = "end"
    SENT = "sent"


LEASE_TRANSITIONS: TransitionTable[LeaseState, LeaseEvent] = TransitionTable(
    {
        (LeaseState.COMPUTING, LeaseEvent.FINISH): LeaseState.FINISHED,
        (LeaseState.COMPUTING, LeaseEvent.ABANDON): None,
        (LeaseState.FINISHED, LeaseEvent.ANNOUNCE): LeaseState.HELD,
        (LeaseState.HELD, LeaseEvent.END): LeaseState.ENDING,
        (LeaseState.HELD, LeaseEvent.SENT): None,
        (LeaseState.ENDING, LeaseEvent.SENT): None,
    }
)


class LeaseUse(TableEnum):
    """What a lease is for; the value begins the names of its counters."""

    PROMPT = "leases"
    """A prompt that was prefilled here, for the engine that decodes it: soon, or never."""
    TURN = "turns"
    """A prompt and the answer that was decoded here, for the prefill of the conversation's next turn: some time."""


@dataclass(slots=True)
class Lease:
    """One request's claim on a slot.

    Attributes:
        held_s: on the ledger's own clock: since when the workers have known of the hold.
        deadline_s: on the same clock; meaningful while HELD.
        claimed_until_s: on the same clock; until then a consumer certainly waits, since it has renewed the lease.
        blocks: for the workers, if they want to know them.
        ended_by: why nobody reads any more (`release`, `expired`, …), set when that is decided.
        name: what other engines and the workers call it.
    """

    request_id: str
    slot: int
    epoch: Epoch
    use: LeaseUse = LeaseUse.PROMPT
    state: LeaseState = LeaseState.COMPUTING
    held_s: float = 0.0
    deadline_s: float = 0.0
    claimed_until_s: float = 0.0
    blocks: Blocks = ()
    ended_by: str = ""
    name: LeaseName = field(init=False)

    def __post_init__(self) -> None:
        self.name = LeaseName(slot=self.slot, epoch=epoch_to_text(self.epoch))

    def __str__(self) -> str:
        return f"req={self.request_id} slot={self.slot}"


class WorkerAcks:
    """Counts distinct workers, so that a repeated acknowledgement counts once.

    Args:
        workers: of this engine, in all its pipeline stages and with all replicas; they are numbered from 0.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._missing: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """Requests that some workers, but not all, have acknowledged."""
        return len(self._missing)

    def requests(self) -> set[str]:
        """These requests."""
        return set(self._missing)

    def take(self, worker: int, request_ids: Iterable[str]) -> list[str]:
        """A worker has cleared the slots of these requests. Returns those that all workers have acknowledged now.

        Unknown worker ids are ignored.
        """
        if not 0 <= worker < self.workers:
            return []
        if self.workers == 1:
            return list(request_ids)
        over = []
        for request_id in request_ids:
            missing = self._missing.setdefault(request_id, set(range(self.workers)))
            missing.discard(worker)
            if not missing:
                del self._missing[request_id]
                over.append(request_id)
        return over
