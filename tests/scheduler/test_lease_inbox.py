"""The inbox of renewals and releases while the engine is idle."""

from __future__ import annotations

import pytest

from kvferry.protocol.handshake import LeaseName, Release, Renew
from kvferry.scheduler import step as lease_inbox
from kvferry.scheduler.step import LeaseInbox, ReceivedLease
from tests.protocol.samples import BOOT, EPOCH

A, B, C = (LeaseName(slot=slot, epoch=EPOCH) for slot in range(3))


def test_repeated_renewals_of_a_lease_are_one_entry_with_the_latest_time() -> None:
    inbox = LeaseInbox()
    for second in range(1000):
        assert inbox.put(Renew(boot=BOOT, leases=(A, B)), float(second))
    assert inbox.put(Renew(boot=BOOT, leases=(A,)), 1000.5)
    assert inbox.take() == [ReceivedLease(Renew, BOOT, B, 999.0), ReceivedLease(Renew, BOOT, A, 1000.5)]
    assert inbox.take() == []


def test_a_release_is_not_lost_to_renewals_nor_the_other_way_round() -> None:
    inbox = LeaseInbox()
    inbox.put(Renew(boot=BOOT, leases=(A,)), 1.0)
    inbox.put(Release(boot=BOOT, leases=(A,)), 2.0)
    inbox.put(Renew(boot="f" * 32, leases=(A,)), 3.0)
    assert [(received.kind, received.boot) for received in inbox.take()] == [
        (Renew, BOOT),
        (Release, BOOT),
        (Renew, "f" * 32),
    ]


def test_in_a_full_inbox_renewals_replace_those_of_the_same_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_inbox, "MAX_WAITING_LEASES", 2)
    inbox = LeaseInbox()
    assert inbox.put(Renew(boot=BOOT, leases=(A, B, B)), 1.0)
    assert not inbox.put(Renew(boot=BOOT, leases=(A, C)), 2.0), "one too many"
    assert inbox.put(Renew(boot=BOOT, leases=(A,)), 3.0)
    assert [received.received_s for received in inbox.take()] == [1.0, 3.0]
