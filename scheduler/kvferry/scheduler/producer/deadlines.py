"""When held leases run out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvferry.scheduler.requests import LeaseUse, ProducerLease

PREFIX_S = 5.0
"""Lifetime of a prefix's lease without a renewal: who has asked for it waits for it, and renews it at once."""
SCAN_S = 10e-6
"""Wait per held lease until deadlines are checked again: a hundred times what the check costs."""


class Deadlines:
    """Deadlines of held leases whose requests have ended.

    Args:
        lease_s: lifetime of a held lease without a renewal.
        turn_s: the same for a turn's lease.
    """

    def __init__(self, lease_s: float, turn_s: float) -> None:
        self._lifetime_s = {
            LeaseUse.PROMPT: lease_s,
            LeaseUse.TURN: turn_s,
            LeaseUse.PREFIX: min(lease_s, PREFIX_S),
        }
        # No deadline passes before this time. It may be too early, after a renewal or an end; never too late.
        self._next_due_s = math.inf

    def start(self, lease: ProducerLease, clock_s: float) -> None:
        """From now on a held lease expires unless it is renewed."""
        lease.held_s = clock_s
        # A renewal that came before counts: a consumer that reads a stream renews it while it is computed.
        lease.deadline_s = max(
            lease.claimed_until_s, clock_s + self._lifetime_s[lease.use]
        )
        self._next_due_s = min(self._next_due_s, lease.deadline_s)

    def may_be_due(self, clock_s: float) -> bool:
        """True if a deadline may have passed; its lease may have been renewed or ended since."""
        return clock_s >= self._next_due_s

    def due(self, held: Iterable[ProducerLease], clock_s: float) -> list[ProducerLease]:
        """The held leases whose deadline has passed. It reads all of them."""
        due: list[ProducerLease] = []
        num_held = 0
        earliest_s = math.inf
        for lease in held:
            num_held += 1
            if lease.deadline_s <= clock_s:
                due.append(lease)
            else:
                earliest_s = min(earliest_s, lease.deadline_s)
        # A renewal only adds time, so none of the others is due before the earliest deadline that was found.
        self._next_due_s = max(earliest_s, clock_s + num_held * SCAN_S)
        return due
