"""The life of a worker's registered memory: the transition table, and the generations that it counts.

                    withdraw              quiet                 deregistered
    ─→ REGISTERED ───────────→ DRAINING ─────────→ QUIET ───────────────────────→ WITHDRAWN
         ↑   ↑                     │                 │                                │
         │   └──────── kept ───────┴────── kept ─────┘                                │
         └────────────────────────── registered: generation + 1 ──────────────────────┘

An engine that sleeps takes the pages of its caches away. What must be over before that is behind the one way to
WITHDRAWN, and each arrow of it is one step of `FerryWorker`:

| step | what is over then |
| --- | --- |
| withdraw | every lease: the slots are empty, so no read that is under way counts |
| quiet | every load, and every read of this worker: nothing writes into its memory |
| deregistered | the agent: what peers have posted fails on their side, and nothing here serves it |

Between `quiet` and `deregistered` all workers of the engine agree: a worker that cannot be quiet keeps its memory, and
so do the others.
"""

from __future__ import annotations

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.transitions import TableEnum, cannot_happen


class MemoryState(TableEnum):
    """States of a worker's memory."""

    REGISTERED = "registered"
    """Peers may read it, and loads may write into it."""
    DRAINING = "draining"
    """All leases have ended, all loads have failed; reads of this worker may still write."""
    QUIET = "quiet"
    """This worker reads nothing, and its transfer thread has ended; peers may still try to read."""
    WITHDRAWN = "withdrawn"
    """The fabric knows nothing of it: its pages may go."""


class MemoryEvent(TableEnum):
    """Events of a worker's memory."""

    WITHDRAW = "withdraw"
    QUIET = "quiet"
    KEPT = "kept"
    DEREGISTERED = "deregistered"
    REGISTERED = "registered"


# WITHDRAWN is reached through QUIET alone: so no path lets pages go under a read.
MEMORY_TRANSITIONS: dict[tuple[MemoryState, MemoryEvent], MemoryState] = {
    (MemoryState.REGISTERED, MemoryEvent.WITHDRAW): MemoryState.DRAINING,
    (MemoryState.DRAINING, MemoryEvent.QUIET): MemoryState.QUIET,
    (MemoryState.DRAINING, MemoryEvent.KEPT): MemoryState.REGISTERED,
    (MemoryState.QUIET, MemoryEvent.KEPT): MemoryState.REGISTERED,
    (MemoryState.QUIET, MemoryEvent.DEREGISTERED): MemoryState.WITHDRAWN,
    (MemoryState.WITHDRAWN, MemoryEvent.REGISTERED): MemoryState.REGISTERED,
}


class WithdrawalRefused(KvferryError):
    """The memory cannot be withdrawn now, so its pages must stay; the text says what still uses it."""


class Registration:
    """The state of one worker's memory. Changed on the engine's step thread alone.

    Attributes:
        state: now.
        generation: how often the memory was registered again; 0 for the first time.
    """

    def __init__(self) -> None:
        self.state = MemoryState.REGISTERED
        self.generation = 0

    def __str__(self) -> str:
        return f"memory of generation {self.generation}"

    def apply(self, event: MemoryEvent) -> None:
        """An event has happened.

        Raises:
            LocalProtocolError: it cannot happen in this state, which stays.
        """
        self.check(event)
        self.state = MEMORY_TRANSITIONS[self.state, event]
        if event is MemoryEvent.REGISTERED:
            self.generation += 1

    def check(self, event: MemoryEvent) -> None:
        """Check that an event can happen now.

        Raises:
            LocalProtocolError: it cannot.
        """
        if (self.state, event) not in MEMORY_TRANSITIONS:
            raise cannot_happen(self, self.state, event)

    @property
    def is_registered(self) -> bool:
        """Whether orders can be carried out."""
        return self.state is MemoryState.REGISTERED
