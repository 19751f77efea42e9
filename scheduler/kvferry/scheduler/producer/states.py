"""A lease's states. The table is the whole truth; `ledger.py` only carries it out.

  open                finish                announce               sent
───────→ COMPUTING ───────────→ FINISHED ───────────→ HELD ────────────────→ (gone)
             │ abandon                                 │ end (expiry, release)
             ↓                                         ↓          sent
           (gone)                                    ENDING ───────────────→ (gone)
"""

from __future__ import annotations

from kvferry.scheduler.transitions import TableEnum, TransitionTable


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
