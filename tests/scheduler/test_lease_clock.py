"""A lease's time: when it starts, what renews it, and which pauses count."""

from __future__ import annotations

import pytest

from kvferry.protocol.handshake import LeaseName
from kvferry.scheduler.producer.eviction_order import release_idle_turns
from kvferry.scheduler.producer.lease import Lease, LeaseState, LeaseUse
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.state import HEARTBEATS_PER_LEASE, Counters

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
