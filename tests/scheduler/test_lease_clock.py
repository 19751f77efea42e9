"""A lease's time: when it starts, what renews it, which pauses count, and whichever thread winds its clock."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.link.awake_clock import AwakeClock
from kvferry.link.counters import Counters
from kvferry.link.limits import HEARTBEATS_PER_LEASE
from kvferry.link.server import SideChannelListener
from kvferry.scheduler.producer.eviction_order import release_idle_turns
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.requests import LeaseState, LeaseUse, ProducerLease
from tests.link.channel import HOST, free_port
from tests.promises import promise
from tests.waiting import wait_until

LEASE_S = 30.0
HEARTBEAT_S = LEASE_S / HEARTBEATS_PER_LEASE


class Clocked:
    """A ledger with one lease and a caller's clock."""

    def __init__(
        self, use: LeaseUse = LeaseUse.PROMPT, turn_s: float | None = None
    ) -> None:
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

    def finish(self) -> ProducerLease:
        lease = self.ledger.finish("a")
        assert lease is not None
        return lease

    @property
    def is_held(self) -> bool:
        return self.ledger.state("a") is LeaseState.HELD


def test_the_clock_starts_when_the_request_has_ended() -> None:
    clocked = Clocked()
    clocked.finish()
    clocked.steps(LEASE_S - 0.5)
    assert clocked.is_held
    clocked.step(0.5)
    assert clocked.ledger.state("a") is LeaseState.ENDING


def test_a_lease_that_ended_before_its_request_has_no_time_left() -> None:
    clocked = Clocked()
    lease = clocked.ledger.complete("a")
    assert lease is not None
    assert clocked.ledger.release(lease.name)
    clocked.step()
    clocked.ledger.request_ended(lease)
    clocked.ledger.sent("a")
    assert clocked.counters.take_samples().get("lease_left_s") is None


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


@promise(5)
def test_a_consumer_that_stalls_for_less_than_the_lease_minus_one_heartbeat_loses_nothing() -> (
    None
):
    clocked = Clocked()
    lease = clocked.finish()
    clocked.step()
    for _ in range(4):
        clocked.steps(HEARTBEAT_S)
        assert clocked.ledger.renew(lease.name)
    stall_s = LEASE_S - HEARTBEAT_S - 0.5
    clocked.steps(HEARTBEAT_S + stall_s)
    assert clocked.ledger.renew(lease.name), "its next heartbeat comes too late"


@promise(5)
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


def test_after_a_stop_of_the_process_one_heartbeat_has_passed_whichever_thread_winds_first() -> (
    None
):
    clock = AwakeClock(HEARTBEAT_S)
    for now_s in (100.0, 101.0, 1000.0, 1000.0, 1000.5, 999.0, 1000.6):
        clock.wind(now_s)
    assert round(clock.awake_s, 6) == 1.0 + HEARTBEAT_S + 0.6


def test_two_threads_that_wind_the_clock_count_no_time_twice() -> None:
    clock = AwakeClock(HEARTBEAT_S)
    started_s = clock.wind(time.monotonic())
    began_s = time.monotonic()

    def wind() -> None:
        for _ in range(20_000):
            clock.wind(time.monotonic())

    threads = [threading.Thread(target=wind) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown_s = clock.wind(time.monotonic()) - started_s
    assert shown_s <= time.monotonic() - began_s + 0.01


def test_an_idle_engine_loses_no_time_because_its_listener_winds_the_clock() -> None:
    clock = AwakeClock(0.02)
    listener = SideChannelListener(HOST, free_port(), Counters(), clock=clock)
    try:
        wait_until(
            lambda: clock.awake_s >= 10 * clock.heartbeat_s,
            "ten heartbeats have passed without a step",
        )
    finally:
        listener.close()


def test_a_renewal_counts_from_its_arrival_and_not_from_the_step_that_applies_it() -> (
    None
):
    clocked = Clocked()
    lease = clocked.finish()
    clocked.step()
    received_s = 0.0
    for run_due in range(1, 20):
        shown_s = clocked.ledger.clock.wind(clocked.now_s + run_due * HEARTBEAT_S / 2)
        received_s = shown_s if run_due == 8 else received_s
    assert received_s == 20.0
    assert clocked.ledger.renew(lease.name, received_s)
    clocked.step(49.9)
    assert clocked.is_held, "the lease was renewed for its full time"
    clocked.step(0.1)
    assert not clocked.is_held, "it was renewed when it was taken"
