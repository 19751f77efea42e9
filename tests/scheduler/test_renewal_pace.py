"""How often leases are renewed: each at its own interval, those of one producer together where they are close."""

from __future__ import annotations

import time

from kvferry.scheduler.consumer.remote_lease import RenewLease
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.state.clock import HEARTBEATS_PER_LEASE
from kvferry.scheduler.state.counters import Counters
from tests.scheduler.channel import listening
from tests.scheduler.test_renewer import LONG_S, lease


def test_each_lease_of_a_producer_is_renewed_at_its_own_interval_however_short_a_forged_one(
    renewer: LeaseRenewer, counters: Counters
) -> None:
    """With the shortest interval for all, 500 leases beside one of 0.05 s were renewed 52,856 times a second."""
    with listening() as (listener, port):
        start_s = time.monotonic()
        renewer.submit(RenewLease(lease(port, slot, lease_s=LONG_S)) for slot in range(500))
        renewer.submit([RenewLease(lease(port, 501)), RenewLease(lease(port, 500, lease_s=0.05))])
        for _ in range(6):
            renewal = listener.inbox.get(timeout=10)
            assert {name.slot for name in renewal.leases} == {500, 501}
        assert counters.total("heartbeats") <= 2 * (1 + (time.monotonic() - start_s) * HEARTBEATS_PER_LEASE)


def test_leases_whose_interval_is_nearly_over_join_a_renewal(renewer: LeaseRenewer) -> None:
    with listening() as (listener, port):
        renewer.submit([RenewLease(lease(port, 1, lease_s=3.0)), RenewLease(lease(port, 2, lease_s=3.3))])
        for _ in range(3):
            renewal = listener.inbox.get(timeout=10)
            assert {name.slot for name in renewal.leases} == {1, 2}
