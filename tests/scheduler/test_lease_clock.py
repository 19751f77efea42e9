"""A lease's time: when it starts, what renews it, and which pauses count."""

from __future__ import annotations

import pytest

from kvferry.protocol.handshake import LeaseName
from kvferry.scheduler.producer.eviction_order import release_idle_turns
from kvferry.scheduler.producer.lease import Lease, LeaseState, LeaseUse
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.state.clock import HEARTBEATS_PER_LEASE
from kvferry.scheduler.state.counters import Counters

LEASE_S = 30.0
HEARTBEAT_S = LEASE_S / HEARTBEATS_PER_LEASE


class Clocked:
    """A ledger with one lease and a caller's clock."""

    def __init__(self, use: LeaseUse = LeaseUse.PROMPT, turn_s: float | None = None) -> None:
        self.now_s = 100.0
        self.counters = Counters()
        self.ledger = ProducerLedger(4, LEASE_S, self.counters, turn_s=turn_s)
        self.ledger.open("a", use)
        self.step()

    def step(self, passed_s: float = 0.0) -> None:
        self.now_s += passed_s
        self.ledger.take_orders(self.now_s)

    def steps(self, seconds: float, pace_s: float = 0.5) -> None:
        for _ in range(round(seconds / pace_s)):
            self.step(pace_s)

    def finish(self) -> Lease:
        lease = self.ledger.finish("a")
        assert lease is not None
        return lease

    @property
    def is_held(self) -> bool:
        return self.ledger.state("a") is LeaseState.HELD


def test_a_running_request_has_no_clock() -> None:
    clocked = Clocked()
    clocked.steps(10 * LEASE_S)
    assert clocked.ledger.state("a") is LeaseState.COMPUTING


def test_the_clock_starts_when_the_workers_learn_that_the_blocks_are_held() -> None:
    clocked = Clocked()
    clocked.finish()
    clocked.now_s += HEARTBEAT_S * 0.9
    clocked.step()
    assert clocked.is_held
    clocked.steps(LEASE_S - 0.5)
    assert clocked.is_held
    clocked.step(0.5)
    assert clocked.ledger.state("a") is LeaseState.ENDING


def test_a_renewal_gives_the_full_time_again() -> None:
    clocked = Clocked()
    lease = clocked.finish()
    clocked.step()
    for _ in range(5):
        clocked.steps(LEASE_S - 0.5)
        assert clocked.ledger.renew(lease.name)
    clocked.steps(LEASE_S - 0.5)
    assert clocked.is_held
    clocked.step(0.5)
    assert not clocked.is_held


def test_a_consumer_that_stalls_for_less_than_the_lease_minus_one_heartbeat_loses_nothing() -> None:
    clocked = Clocked()
    lease = clocked.finish()
    clocked.step()
    for _ in range(4):
        clocked.steps(HEARTBEAT_S)
        assert clocked.ledger.renew(lease.name)
    stall_s = LEASE_S - HEARTBEAT_S - 0.5
    clocked.steps(HEARTBEAT_S + stall_s)
    assert clocked.ledger.renew(lease.name), "its next heartbeat comes too late"


@pytest.mark.parametrize("pause_s", [LEASE_S, 3600.0])
def test_a_pause_of_the_producer_does_not_expire_leases(pause_s: float) -> None:
    """Renewals that arrived meanwhile may still wait inside this process: they are applied first."""
    clocked = Clocked()
    lease = clocked.finish()
    clocked.step()
    clocked.step(pause_s)
    assert clocked.is_held
    assert clocked.ledger.renew(lease.name)
    clocked.steps(LEASE_S - 0.5)
    assert clocked.is_held


def test_steps_longer_than_a_heartbeat_delay_the_end_of_a_lease_but_only_by_their_number() -> None:
    clocked = Clocked()
    clocked.finish()
    clocked.step()
    for _ in range(HEARTBEATS_PER_LEASE - 1):
        clocked.step(10 * HEARTBEAT_S)
        assert clocked.is_held
    clocked.step(10 * HEARTBEAT_S)
    assert not clocked.is_held


def test_a_release_before_the_workers_know_of_the_hold_ends_it_in_the_next_step() -> None:
    clocked = Clocked()
    lease = clocked.finish()
    assert clocked.ledger.release(lease.name)
    first = clocked.ledger.take_orders(clocked.now_s)
    assert [hold.request_id for hold in first.holds] == ["a"]
    assert not first.ends
    second = clocked.ledger.take_orders(clocked.now_s)
    assert [end.request_id for end in second.ends] == ["a"]
    clocked.ledger.sent("a")
    assert clocked.counters.total("leases_released", "release") == 1


def test_a_slot_that_is_reused_within_a_step_is_ended_before_it_is_opened() -> None:
    ledger = ProducerLedger(1, LEASE_S, Counters())
    ledger.open("a")
    ledger.take_orders(0.0)
    ledger.abandon("a")
    assert ledger.open("b")
    orders = ledger.take_orders(0.1)
    assert [(end.request_id, end.slot) for end in orders.ends] == [("a", 0)]
    assert [opened.slot for opened in orders.opens] == [0]
    assert orders.ends[0].epoch != orders.opens[0].epoch


def test_a_lease_that_was_never_announced_ends_without_orders() -> None:
    ledger = ProducerLedger(1, LEASE_S, Counters())
    ledger.open("a")
    ledger.abandon("a")
    assert not ledger.take_orders(0.0)
    assert ledger.open("b")


def test_renewals_and_releases_of_unknown_leases_are_counted_and_change_nothing() -> None:
    clocked = Clocked()
    lease = clocked.finish()
    clocked.step()
    wrong = LeaseName(slot=lease.slot, epoch=f"{int(lease.name.epoch, 16) ^ 1 or 2:015x}")
    for name in (wrong, LeaseName(slot=3, epoch=lease.name.epoch), LeaseName(slot=2**24 - 1, epoch=lease.name.epoch)):
        assert not clocked.ledger.release(name)
        assert not clocked.ledger.renew(name)
    assert clocked.counters.total("releases_unknown") == clocked.counters.total("renewals_unknown") == 3
    assert clocked.is_held


def test_when_all_slots_are_leased_the_next_request_is_served_without_one() -> None:
    counters = Counters()
    ledger = ProducerLedger(2, LEASE_S, counters)
    assert [ledger.open(name) for name in "abc"] == [True, True, False]
    assert ledger.finish("c") is None
    assert counters.total("leases_refused") == 1
    ledger.abandon("a")
    assert ledger.open("c")


def test_the_deadline_of_a_lease_that_is_over_does_not_touch_the_next_one_in_its_slot() -> None:
    clocked = Clocked()
    lease = clocked.finish()
    clocked.step()
    assert clocked.ledger.release(lease.name)
    clocked.step()
    clocked.ledger.sent("a")
    clocked.ledger.open("b")
    clocked.steps(2 * LEASE_S)
    following = clocked.ledger.finish("b")
    assert following is not None
    assert following.slot == lease.slot
    clocked.step()
    clocked.steps(LEASE_S - 0.5)
    assert clocked.ledger.state("b") is LeaseState.HELD


@pytest.mark.parametrize("turn_s", [5.0, 480.0])
def test_a_turn_lives_its_own_time_and_no_step_longer(turn_s: float) -> None:
    clocked = Clocked(LeaseUse.TURN, turn_s)
    clocked.finish()
    clocked.step()
    clocked.steps(turn_s - 0.5)
    assert clocked.is_held
    clocked.step(0.5)
    assert clocked.ledger.state("a") is LeaseState.ENDING
    clocked.ledger.sent("a")
    assert clocked.counters.total("turns_released", "expired") == 1
    assert clocked.counters.total("leases_released", "expired") == 0


def test_a_claim_of_a_turn_lasts_for_a_lease_after_the_last_renewal() -> None:
    clocked = Clocked(LeaseUse.TURN, 480.0)
    lease = clocked.finish()
    clocked.step()
    for _ in range(2):
        assert clocked.ledger.renew(lease.name)
        clocked.steps(LEASE_S - 0.5)
        assert release_idle_turns(clocked.ledger, "shutdown") == 0
    clocked.step(0.5)
    assert release_idle_turns(clocked.ledger, "shutdown") == 1


def test_a_renewal_of_a_turn_adds_a_lease_and_never_shortens_its_time() -> None:
    clocked = Clocked(LeaseUse.TURN, 100.0)
    lease = clocked.finish()
    clocked.step()
    assert clocked.ledger.renew(lease.name)
    clocked.steps(99.5)
    assert clocked.is_held
    assert clocked.ledger.renew(lease.name)
    clocked.steps(LEASE_S - 0.5)
    assert clocked.is_held
    clocked.step(0.5)
    assert clocked.ledger.state("a") is LeaseState.ENDING
