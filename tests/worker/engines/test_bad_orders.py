"""Orders with wrong params, which pass every type check, or that cannot be decoded: only their own loads fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.protocol.orders import (
    FailureReason,
    LeaseOpen,
    StepOrders,
    encode_head,
    encode_orders,
)
from kvferry.protocol.params import RemotePrefill, sign_params
from kvferry.protocol.slots import SlotState, epoch_from_text, slot_word
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import POISON, Engine, Offer
from tests.harness.exported import slots_of
from tests.harness.rig import Rig

TOKENS = 10
SHAPE_BLOCKS = 48


def _fails(
    rig: Rig, producer: Engine, consumer: Engine, params: RemotePrefill
) -> FailureReason:
    data_reads = consumer.fabric.calls["post_data_read"]
    load = consumer.load(params)
    reason = rig.until_over(consumer, load)
    assert reason is not None
    assert consumer.fabric.calls["post_data_read"] == data_reads
    for found, before in zip(consumer.caches.memory, load.before, strict=True):
        assert (found == before).all(), (
            "a load that failed before its read has written something"
        )
    consumer.free(load)
    rig.transfer(producer, consumer, seed=8)
    return reason


WRONG_BLOCKS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], ...]]] = {
    "a block beyond the cache": lambda blocks: ((*blocks[:-1], SHAPE_BLOCKS),),
    "the largest block id": lambda blocks: ((*blocks[:-1], 2**31 - 1),),
    "the null block": lambda blocks: ((*blocks[:-1], 0),),
    "too few blocks": lambda blocks: (blocks[:1],),
    "too many blocks": lambda blocks: ((*blocks, 1),),
    "no blocks": lambda _: ((),),
    "two groups": lambda blocks: (blocks, blocks),
}


@pytest.mark.parametrize("wrong", WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_signed_params_with_wrong_blocks_fail_as_params(
    rig: Rig, wrong: Callable[[tuple[int, ...]], tuple[tuple[int, ...], ...]]
) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(TOKENS)
    params = producer.changed(offer, remote_block_ids=wrong(offer.blocks))
    assert _fails(rig, producer, consumer, params) is FailureReason.PARAMS


WRONG_LEASES: dict[str, tuple[Callable[[Offer], dict[str, Any]], FailureReason]] = {
    "a slot beyond the table": (
        lambda _: {"lease_slot": SETTINGS.lease_slots},
        FailureReason.PARAMS,
    ),
    "the largest slot": (lambda _: {"lease_slot": 2**24 - 1}, FailureReason.PARAMS),
    "the slot of another lease": (
        lambda other: {"lease_slot": other.slot},
        FailureReason.FENCE,
    ),
    "another epoch": (lambda _: {"lease_epoch": "0" * 14 + "1"}, FailureReason.FENCE),
}


@pytest.mark.parametrize(("wrong", "reason"), WRONG_LEASES.values(), ids=WRONG_LEASES)
def test_signed_params_that_name_no_lease_of_their_own_fail(
    rig: Rig, wrong: Callable[[Offer], dict[str, Any]], reason: FailureReason
) -> None:
    producer, consumer = rig.pair()
    other, own = producer.prefill(TOKENS, seed=1), producer.prefill(TOKENS, seed=2)
    assert (
        _fails(rig, producer, consumer, producer.changed(own, ticket=wrong(other)))
        is reason
    )


def _with(**fields: Any) -> Callable[[RemotePrefill], RemotePrefill]:
    return lambda params: msgspec.structs.replace(params, **fields)


def _with_ticket(**fields: Any) -> Callable[[RemotePrefill], RemotePrefill]:
    return lambda params: _with(
        kvferry=msgspec.structs.replace(params.kvferry, **fields)
    )(params)


CHANGED: dict[str, Callable[[RemotePrefill], RemotePrefill]] = {
    "another request's blocks": _with(remote_block_ids=((1, 2, 3),)),
    "more tokens": _with(remote_num_tokens=TOKENS + 1),
    "another request": _with(remote_request_id="another-request"),
    "another size": _with(tp_size=2),
    "another slot": _with_ticket(lease_slot=7),
    "a longer lease": _with_ticket(lease_s=10_000.0),
    "another MAC": _with_ticket(mac="f" * 64),
    "a MAC under a key that the client chose": lambda params: sign_params(
        params, b"x" * 32
    ),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_params_that_a_client_has_changed_fail_by_their_mac(
    rig: Rig, change: Callable[[RemotePrefill], RemotePrefill]
) -> None:
    producer, consumer = rig.pair()
    params = change(producer.prefill(TOKENS).params)
    assert _fails(rig, producer, consumer, params) is FailureReason.MAC


def test_orders_of_which_one_is_wrong_do_not_spoil_the_others(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    offers = [producer.prefill(TOKENS, seed=seed) for seed in range(4)]
    wrong = producer.changed(offers[1], remote_block_ids=((10**6,),))
    loads = [
        consumer.load(wrong if index == 1 else offer.params)
        for index, offer in enumerate(offers)
    ]
    assert [any_rig.until_over(consumer, load) for load in loads] == [
        None,
        FailureReason.PARAMS,
        None,
        None,
    ]
    for index in (0, 2, 3):
        assert consumer.has_bytes(loads[index], seed=index)
    untouched = consumer.caches.cells(0)[list(loads[1].blocks)]
    assert (untouched == POISON).all()


EPOCH = "0" * 14 + "7"


def test_requests_whose_prefill_has_failed_fail_in_the_same_step_whatever_the_transfer_thread_does(
    rig: Rig,
) -> None:
    """It may be stuck, or the rest of the orders lost."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    orders = StepOrders(boot="0" * 32, fails=("failed",))
    consumer.workers[0].carry_out(encode_head(orders), b"")
    assert consumer.workers[0].take_results().failed == {
        "failed": FailureReason.PREFILL
    }
    rig.transfer(producer, consumer)


def test_loads_of_orders_that_cannot_be_read_fail_and_later_ones_are_good(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    params = producer.prefill(10).params
    assert consumer.loads.offer("lost", params, 10, 0.0) is None
    blocks = consumer.take_blocks(10)
    consumer.loads.allocated(
        "lost", consumer.loads.matched_tokens("lost", 0), (blocks,)
    )
    orders = StepOrders(boot=consumer.boot, loads=consumer.loads.take_orders().loads)
    consumer.worker.carry_out(encode_head(orders), encode_orders(orders)[:-3])
    rig.step_until(lambda: consumer.seen.failed, "the load has failed")
    assert consumer.seen.failed == {"lost": FailureReason.ORDERS}
    assert consumer.seen.counts["lost_orders"] == 1
    assert not consumer.seen.alive
    consumer.loads.finished("lost")
    rig.transfer(producer, consumer, seed=3)


@pytest.mark.parametrize(
    "head", [b"", b"\xc1", encode_orders(StepOrders(boot="0" * 32))[:-1]]
)
def test_a_head_that_cannot_be_read_is_counted_and_stops_nothing_else(
    rig: Rig, head: bytes
) -> None:
    producer, consumer = rig.pair()
    consumer.worker.carry_out(head, encode_orders(StepOrders(boot=consumer.boot)))
    assert consumer.collect()[0].counts["lost_orders"] == 1
    assert consumer.collect()[0].counts["lost_orders"] == 0
    rig.transfer(producer, consumer)


def test_leases_are_open_when_the_orders_have_been_handed_over_even_if_the_rest_is_lost(
    rig: Rig,
) -> None:
    engine = rig.engine("P")
    opened = StepOrders(boot=engine.boot, opens=(LeaseOpen(slot=3, epoch=EPOCH),))
    engine.worker.carry_out(encode_head(opened), b"\xc1")
    assert int(slots_of(engine.worker).words[3]) == slot_word(
        epoch_from_text(EPOCH), SlotState.COMPUTING
    )
    rig.step_until(lambda: engine.seen.counts["lost_orders"], "the loss is counted")
