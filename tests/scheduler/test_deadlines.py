"""The cost of leases that expire one after the other."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvferry.link.counters import Counters
from kvferry.scheduler.producer.ledger import SCAN_S, Deadlines, ProducerLedger
from kvferry.scheduler.requests import ProducerLease

LEASES = 500
LEASE_S = 30.0
STEP_S = 1e-3


def test_leases_that_expire_one_by_one_are_not_all_visited_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were held a step apart, and no consumer reads them."""
    visits: list[float] = []
    find_due = Deadlines.due

    def counted(
        deadlines: Deadlines, held: Iterable[ProducerLease], clock_s: float
    ) -> list[ProducerLease]:
        visits.append(clock_s)
        return find_due(deadlines, held, clock_s)

    monkeypatch.setattr(Deadlines, "due", counted)
    ledger = ProducerLedger(LEASES, LEASE_S, Counters())
    for number in range(LEASES):
        ledger.open(f"r{number}")
        ledger.finish(f"r{number}")
        ledger.take_orders(number * STEP_S)
    assert not visits
    deadlines = [lease.deadline_s for lease in ledger.block_references.held.values()]
    now_s = ledger.clock.awake_s
    while now_s + 1.0 < deadlines[0]:
        now_s += 1.0
        ledger.take_orders(now_s)
    assert not visits
    while now_s < deadlines[-1] + 2 * LEASES * SCAN_S:
        now_s += STEP_S
        ledger.take_orders(now_s)
        due = sum(
            deadline_s + LEASES * SCAN_S + STEP_S < now_s for deadline_s in deadlines
        )
        assert len(ledger.block_references.ending) >= due
    assert len(ledger.block_references.ending) == LEASES
    assert len(visits) < LEASES / 2
