"""Which producers the workers prewarm before a load is ordered, how often, and how much is remembered."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.link.counters import Counters
from kvferry.protocol.orders import (
    NO_LOADS,
    Prewarm,
    StepOrders,
    decode_orders,
    encode_orders,
)
from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.consumer import ledger
from kvferry.scheduler.consumer.ledger import (
    MAX_PREWARMS,
    PREWARM_AGAIN_S,
    ConsumerLedger,
    PrewarmQueue,
)
from kvferry.scheduler.producer.ledger import ProducerLedger
from tests.protocol.samples import BOOT, make_params, make_ticket

PRODUCER = Prewarm.from_params(make_params())


def source(slot: int, **changes: object) -> RemotePrefill:
    return make_params(ticket=make_ticket(lease_slot=slot), **changes)


def test_the_producer_of_a_prompt_is_prewarmed_by_the_orders_of_the_next_step_and_not_again_by_the_one_after() -> (
    None
):
    loads = ConsumerLedger(Counters())
    assert loads.offer("d1", source(1), 300, 5.0) is None
    assert loads.offer("d2", source(2), 300, 5.0) is None
    assert loads.offer("d3", source(3, remote_port=77), 300, 5.0) is None
    orders = loads.take_orders()
    assert [
        (prewarm.engine_id, prewarm.host, prewarm.port, prewarm.boot)
        for prewarm in orders.prewarms
    ] == [
        ("prefill-0", "10.0.0.1", 5600, BOOT),
        ("prefill-0", "10.0.0.1", 77, BOOT),
    ]
    assert not orders.loads
    assert loads.take_orders() == NO_LOADS


@pytest.mark.parametrize(
    ("slot", "shared", "why"),
    [(1, 300, "lease_in_use"), (2, 0, "other_prompt"), (3, 300, "lease_over")],
)
def test_a_request_that_is_computed_here_prewarms_no_producer(
    slot: int, shared: int, why: str
) -> None:
    loads = ConsumerLedger(Counters())
    assert loads.offer("first", source(1), 300, 0.0) is None
    loads.decline(source(3))
    loads.prewarms.take()
    assert loads.offer("second", source(slot), shared, 2 * PREWARM_AGAIN_S) == why
    loads.decline(source(4))
    assert loads.prewarms.take() == ()


def test_after_a_while_and_after_a_failed_load_the_next_request_names_its_producer_again() -> (
    None
):
    """A worker may have dropped it, and does not report that."""
    loads = ConsumerLedger(Counters())
    loads.offer("d1", source(1), 300, 0.0)
    assert loads.prewarms.take() == (PRODUCER,)
    loads.offer("d2", source(2), 300, PREWARM_AGAIN_S - 0.01)
    assert loads.prewarms.take() == ()
    loads.offer("d3", source(3), 300, PREWARM_AGAIN_S)
    assert loads.prewarms.take() == (PRODUCER,)
    loads.allocated("d3", loads.matched_tokens("d3", 0), ((1,), (2,)))
    loads.failed("d3")
    loads.offer("d4", source(4), 300, PREWARM_AGAIN_S + 0.01)
    assert loads.prewarms.take() == (PRODUCER,)


def test_remembered_producers_and_prewarms_of_one_step_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients choose the names. A producer left out is queued by the next request that needs it."""
    monkeypatch.setattr(ledger, "MAX_PREWARMED", 100)
    prewarms = PrewarmQueue()
    named = [
        Prewarm.from_params(make_params(remote_host=f"10.0.1.{number}"))
        for number in range(MAX_PREWARMS + 1)
    ]
    for one in named:
        prewarms.expect(one, 0.0)
    assert prewarms.take() == tuple(named[:MAX_PREWARMS])
    prewarms.expect(named[-1], 0.0)
    assert prewarms.take() == (named[-1],)
    for number in range(1000):
        prewarms.expect(Prewarm.from_params(make_params(remote_port=1 + number)), 1.0)
        prewarms.take()
    prewarms.expect(named[0], 1.0)
    assert prewarms.take() == (named[0],), (
        "the oldest was forgotten, and is named again"
    )


def test_one_host_leaves_prewarms_of_a_step_for_others() -> None:
    """Clients choose the ports: 64 requests for one host kept all other producers from being prewarmed."""
    prewarms = PrewarmQueue()
    for port in range(1, 200):
        host = ("10.0.0.1", "10.0.0.1.", "0xa.1", "[10.0.0.1]")[port % 4]
        prewarms.expect(
            Prewarm.from_params(make_params(remote_host=host, remote_port=port)), 0.0
        )
    other = Prewarm.from_params(make_params(remote_host="10.0.1.1"))
    prewarms.expect(other, 0.0)
    taken = prewarms.take()
    assert taken[-1] == other
    assert len(taken) == MAX_PREWARMS // 2 + 1
    prewarms.expect(Prewarm.from_params(make_params(remote_port=200)), 0.0)
    assert len(prewarms.take()) == 1, "each step has all of them"


def test_a_static_producer_is_prewarmed_once_and_requests_need_not_name_it_for_a_while() -> (
    None
):
    loads = ConsumerLedger(Counters())
    static = msgspec.structs.replace(PRODUCER, is_static=True)
    loads.prewarms.expect(static, 0.0)
    loads.offer("d1", source(1), 300, 1.0)
    lease_orders = ProducerLedger(4, 6.0, Counters()).take_orders(1.0)
    orders = StepOrders.join(BOOT, lease_orders, loads.take_orders())
    assert orders.prewarms == (static,)
    assert decode_orders(encode_orders(orders)).prewarms == (static,)
    loads.offer("d2", source(2), 300, PREWARM_AGAIN_S)
    assert loads.prewarms.take() == (PRODUCER,), "the workers may have lost it"


def test_static_producers_are_all_prewarmed_even_beyond_the_limit_of_one_step() -> None:
    prewarms = PrewarmQueue()
    named = [
        msgspec.structs.replace(PRODUCER, host=f"10.0.1.{number}", is_static=True)
        for number in range(2 * MAX_PREWARMS)
    ]
    for one in named:
        prewarms.expect(one, 0.0)
    assert prewarms.take() == tuple(named)
