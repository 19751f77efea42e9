"""A step: messages are applied before leases expire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.protocol.handshake import LeaseName, Release, Renew
from kvferry.protocol.orders import StepOrders
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state import HEARTBEATS_PER_LEASE, Counters
from kvferry.scheduler.step import next_orders, receive_messages
from tests.protocol.samples import BOOT, make_params
from tests.scheduler.channel import free_port

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
        receive_messages(self.listener.inbox, self.leases, BOOT, self.counters)
        return next_orders(self.leases, self.loads, BOOT, self.now_s)

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


def test_a_renewal_that_has_arrived_is_applied_before_the_lease_may_expire(scheduler: Scheduler) -> None:
    name = scheduler.hold()
    for _ in range(HEARTBEATS_PER_LEASE - 1):
        scheduler.step(LEASE_S / HEARTBEATS_PER_LEASE)
    scheduler.listener.inbox.put(Renew(boot=BOOT, leases=(name,)))
    assert scheduler.step(LEASE_S / HEARTBEATS_PER_LEASE).ends == ()


def test_a_release_ends_its_lease_in_the_same_step(scheduler: Scheduler) -> None:
    name = scheduler.hold()
    scheduler.listener.inbox.put(Release(boot=BOOT, leases=(name,)))
    assert [end.request_id for end in scheduler.step().ends] == ["p"]


def test_messages_to_another_boot_are_counted_and_change_nothing(scheduler: Scheduler) -> None:
    name = scheduler.hold()
    scheduler.listener.inbox.put(Release(boot="f" * 32, leases=(name,)))
    scheduler.listener.inbox.put(Renew(boot="f" * 32, leases=(name,)))
    assert not scheduler.step()
    assert (scheduler.counters.total("releases_unknown"), scheduler.counters.total("renewals_unknown")) == (1, 1)


def test_the_loads_of_both_ledgers_go_out_together_and_once(scheduler: Scheduler) -> None:
    scheduler.leases.open("p")
    assert scheduler.loads.offer("d", make_params(), 300, 0.0) is None
    scheduler.loads.allocated("d", scheduler.loads.matched_tokens("d", 16), ((1, 2), (3,)))
    orders = scheduler.step()
    assert orders.boot == BOOT
    assert ([load.request_id for load in orders.loads], len(orders.opens)) == (["d"], 1)
    assert not scheduler.step()
