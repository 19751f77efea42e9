"""The heap of deadlines against a model that scans every lease, and its size after any history."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvferry.scheduler.producer.lease import SPARE_DEADLINES, Deadlines, Lease, LeaseState, LeaseUse
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.state import Counters

SLOTS = 64
WEEK_S = 604800.0

actions = st.one_of(
    st.tuples(st.just("hold"), st.integers(0, SLOTS - 1), st.sampled_from([1.0, 5.0, 50.0, WEEK_S])),
    st.tuples(st.just("renew"), st.integers(0, SLOTS - 1), st.sampled_from([1.0, 5.0, 50.0])),
    st.tuples(st.just("end"), st.integers(0, SLOTS - 1), st.just(0.0)),
    st.tuples(st.just("release"), st.integers(0, SLOTS - 1), st.just(0.0)),
    st.tuples(st.just("pass"), st.just(0), st.sampled_from([0.5, 3.0, 40.0])),
)


@given(st.lists(actions, max_size=300))
def test_due_returns_the_same_leases_as_a_scan_of_all(history: list[tuple[str, int, float]]) -> None:
    leases: dict[int, Lease] = {}
    deadlines = Deadlines()
    clock_s = 0.0
    for number, (action, slot, span_s) in enumerate(history):
        lease = leases.get(slot)
        if action == "pass":
            clock_s += span_s
        elif action == "hold" and lease is None:
            lease = leases[slot] = Lease(f"r{number}", state=LeaseState.HELD)
            lease.deadline_s = clock_s + span_s
            deadlines.watch(lease)
        elif action == "renew" and lease is not None:
            lease.deadline_s = max(lease.deadline_s, clock_s + span_s)
        elif action == "end" and lease is not None:
            lease.state = LeaseState.ENDING
        elif action == "release" and lease is not None:
            leases.pop(slot).ended_by = "done"
            deadlines.trim(len(leases))
        held = [x for x in leases.values() if x.state is LeaseState.HELD]
        expected = {x for x in held if x.deadline_s <= clock_s}
        assert deadlines.may_be_due(clock_s) or not expected
        due = list(deadlines.due(clock_s))
        assert set(due) == expected
        assert len(due) == len(expected), "named twice"
        for over in due:
            over.state = LeaseState.ENDING
        assert set(held) - set(due) <= deadlines.watched()
        assert len(deadlines) <= 2 * len(leases) + SPARE_DEADLINES


def test_turns_that_are_read_at_once_leave_no_entries_for_the_week_that_they_were_offered_for() -> None:
    ledger = ProducerLedger(4, 30.0, Counters(), turn_s=WEEK_S)
    for number in range(1000):
        lease = ledger.open(f"r{number}", LeaseUse.TURN) and ledger.finish(f"r{number}")
        assert lease
        ledger.take_orders(float(number))
        ledger.release(lease.name)
        ledger.take_orders(float(number))
        ledger.sent(f"r{number}")
        ledger.check_integrity()
    assert len(ledger) == 0
    assert len(ledger._deadlines) <= SPARE_DEADLINES
