"""The clock of leases: which time it counts, whichever thread winds it."""

from __future__ import annotations

import threading
import time

from kvferry.protocol.handshake import LeaseName
from kvferry.scheduler.producer.lease import Lease, LeaseState
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state import AwakeClock, Counters
from tests.scheduler.channel import HOST, free_port
from tests.waiting import wait_until

HEARTBEAT_S, LEASE_S, TICK_S = 5.0, 30.0, 2.5


def held(clock: AwakeClock) -> tuple[ProducerLedger, LeaseName]:
    """A ledger with one lease, held since now."""
    ledger = ProducerLedger(2, LEASE_S, Counters())
    ledger.clock = clock
    assert ledger.open("a")
    lease = ledger.finish("a", block_ids=(1,))
    assert isinstance(lease, Lease)
    ledger.take_orders(0.0)
    return ledger, lease.name


def test_after_a_stop_of_the_process_one_heartbeat_has_passed_whichever_thread_winds_first() -> None:
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
        wait_until(lambda: clock.awake_s >= 10 * clock.heartbeat_s, "ten heartbeats have passed without a step")
    finally:
        listener.close()


def test_a_lease_that_ran_out_while_idle_ends_with_the_next_step() -> None:
    clock = AwakeClock(HEARTBEAT_S)
    ledger, _ = held(clock)
    for tick in range(1, 15):
        clock.wind(tick * TICK_S)
    assert ledger.state("a") is LeaseState.HELD
    assert [end.request_id for end in ledger.take_orders(15 * TICK_S).ends] == ["a"]


def test_a_renewal_counts_from_its_arrival_and_not_from_the_step_that_applies_it() -> None:
    clock = AwakeClock(HEARTBEAT_S)
    ledger, name = held(clock)
    received_s = 0.0
    for tick in range(1, 20):
        shown_s = clock.wind(tick * TICK_S)
        received_s = shown_s if tick == 8 else received_s
    assert received_s == 20.0
    assert clock.awake_s == 47.5
    assert ledger.renew(name, received_s)
    assert not ledger.take_orders(49.9).ends, "the lease was renewed for its full time"
    assert [end.request_id for end in ledger.take_orders(50.0).ends] == ["a"], "it was renewed when it was taken"
