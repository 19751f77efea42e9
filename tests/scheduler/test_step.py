"""Renewals and releases: kept while the engine is idle, and applied by a step before leases expire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.link import limits
from kvferry.link.commands import LeaseInbox, ReceivedLease
from kvferry.link.counters import Counters
from kvferry.link.limits import HEARTBEATS_PER_LEASE
from kvferry.link.server import SideChannelListener
from kvferry.protocol.handshake import LeaseName, Release, Renew
from kvferry.protocol.orders import StepOrders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from tests.link.channel import free_port
from tests.protocol.samples import BOOT, EPOCH

LEASE_S = 6.0


class Scheduler:
    """Both ledgers, and a listener whose inbox the test fills."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.leases = ProducerLedger(4, LEASE_S, self.counters)
        self.loads = ConsumerLedger(self.counters)
        self.listener = SideChannelListener("127.0.0.1", free_port(), self.counters)
        self.now_s = 50.0

    def step(self, passed_s: float = 0.0) -> StepOrders:
        self.now_s += passed_s
        self.leases.receive(self.listener.inbox.take(), BOOT)
        lease_orders = self.leases.take_orders(self.now_s)
        return StepOrders.join(BOOT, lease_orders, self.loads.take_orders())

    def hold(self) -> LeaseName:
        self.leases.open("p")
        self.step()
        lease = self.leases.finish("p")
        assert lease is not None
        self.step()
        return lease.name


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler()
    yield made
    made.listener.close()


def test_a_renewal_that_has_arrived_is_applied_before_the_lease_may_expire(
    scheduler: Scheduler,
) -> None:
    name = scheduler.hold()
    for _ in range(HEARTBEATS_PER_LEASE - 1):
        scheduler.step(LEASE_S / HEARTBEATS_PER_LEASE)
    scheduler.listener.inbox.put(Renew(boot=BOOT, leases=(name,)))
    assert scheduler.step(LEASE_S / HEARTBEATS_PER_LEASE).ends == ()


def test_messages_to_another_boot_are_counted_and_change_nothing(
    scheduler: Scheduler,
) -> None:
    name = scheduler.hold()
    scheduler.listener.inbox.put(Release(boot="f" * 32, leases=(name,)))
    scheduler.listener.inbox.put(Renew(boot="f" * 32, leases=(name,)))
    assert not scheduler.step()
    assert (
        scheduler.counters.total("releases_unknown"),
        scheduler.counters.total("renewals_unknown"),
    ) == (1, 1)


A, B, C = (LeaseName(slot=slot, epoch=EPOCH) for slot in range(3))


def test_repeated_renewals_of_a_lease_are_one_entry_with_the_latest_time() -> None:
    inbox = LeaseInbox()
    for second in range(1000):
        assert inbox.put(Renew(boot=BOOT, leases=(A, B)), float(second))
    assert inbox.put(Renew(boot=BOOT, leases=(A,)), 1000.5)
    assert inbox.take() == [
        ReceivedLease(Renew, BOOT, B, 999.0),
        ReceivedLease(Renew, BOOT, A, 1000.5),
    ]
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


def test_in_a_full_inbox_renewals_replace_those_of_the_same_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_WAITING_LEASES", 2)
    inbox = LeaseInbox()
    assert inbox.put(Renew(boot=BOOT, leases=(A, B, B)), 1.0)
    assert not inbox.put(Renew(boot=BOOT, leases=(A, C)), 2.0), "one too many"
    assert inbox.put(Renew(boot=BOOT, leases=(A,)), 3.0)
    assert [received.received_s for received in inbox.take()] == [1.0, 3.0]
