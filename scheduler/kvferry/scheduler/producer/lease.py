"""A lease, one request's claim on a slot, and its transition table, which `ledger.py` executes.

  open                finish                announce               sent
───────→ COMPUTING ───────────→ FINISHED ───────────→ HELD ────────────────→ (gone)
             │ abandon                                 │ end (expiry, release)
             ↓                                         ↓          sent
           (gone)                                    ENDING ───────────────→ (gone)

The blocks of a request are freed when every worker has acknowledged the end of its lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.ids import Epoch, epoch_to_text
from kvferry.protocol.params import Blocks
from kvferry.scheduler.state.transitions import TableEnum, TransitionTable


class LeaseState(TableEnum):
    """States of a lease."""

    COMPUTING = "computing"
    """The request runs; the slot is COMPUTING in every worker's lease table."""
    FINISHED = "finished"
    """The request has ended and its blocks are kept; not announced to the workers yet, so no deadline."""
    HELD = "held"
    """Announced to the workers; the deadline counts."""
    ENDING = "ending"
    """Reads are not allowed any more; the workers clear their slots and report."""


class LeaseEvent(TableEnum):
    """Events of a lease."""

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
    """The use of a lease; the value is the prefix of the names of its counters."""

    PROMPT = "leases"
    """A prompt that was prefilled here, for the engine that decodes it: read soon, or never."""
    TURN = "turns"
    """A prompt and its answer decoded here, for the prefill of the conversation's next turn: at an unknown time."""


@dataclass(slots=True)
class Lease:
    """One request's claim on a slot.

    Attributes:
        held_s: when the hold was announced to the workers, on the ledger's clock.
        deadline_s: on the same clock; meaningful while HELD.
        claimed_until_s: on the same clock; until then a consumer waits for it, since it has renewed the lease.
        blocks: for the workers, where they need them.
        ended_by: why the lease ends (`release`, `expired`, …), set when that is decided.
        name: its name in messages and orders.
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
    """Acknowledgements by worker, so that a repeated one counts once.

    Args:
        workers: the number of workers of this engine, in all pipeline stages and replicas; ids begin at 0.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._missing: dict[str, set[int]] = {}

    def __len__(self) -> int:
        """The number of requests that some workers, but not all, have acknowledged."""
        return len(self._missing)

    def requests(self) -> set[str]:
        """Requests that some workers, but not all, have acknowledged."""
        return set(self._missing)

    def take(self, worker: int, request_ids: Iterable[str]) -> list[str]:
        """Add a worker's acknowledgements; return the requests that all workers have acknowledged now.

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
