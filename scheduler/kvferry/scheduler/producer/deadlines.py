"""When held leases run out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvferry.scheduler.producer.lease import LeaseUse, ProducerLease

SCAN_S = 10e-6
"""Wait per held lease until deadlines are checked again: a hundred times what the check costs."""


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
