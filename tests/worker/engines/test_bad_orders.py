"""Params that pass every type check and are wrong all the same: the load fails by name, nothing is read or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.params_mac import sign_params
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import POISON, Engine, Offer
from tests.harness.rig import Rig

TOKENS = 10
SHAPE_BLOCKS = 48


def _fails(rig: Rig, producer: Engine, consumer: Engine, params: RemotePrefill) -> FailureReason:
    data_reads = consumer.fabric.calls["post_data_read"]
    load = consumer.load(params)
    reason = rig.until_over(consumer, load)
    assert reason is not None
    assert consumer.fabric.calls["post_data_read"] == data_reads
    for found, before in zip(consumer.caches.memory, load.before, strict=True):
        assert (found == before).all(), "a load that failed before its read has written something"
    consumer.free(load)
    rig.transfer(producer, consumer, seed=8)
    return reason


Change = Callable[[Engine, Offer], RemotePrefill]
SIGNED_BUT_WRONG: dict[str, Change] = {
    "a block beyond the cache": lambda p, o: p.changed(o, remote_block_ids=((*o.blocks[:-1], SHAPE_BLOCKS),)),
    "the largest block id": lambda p, o: p.changed(o, remote_block_ids=((*o.blocks[:-1], 2**31 - 1),)),
    "the null block": lambda p, o: p.changed(o, remote_block_ids=((*o.blocks[:-1], 0),)),
    "too few blocks": lambda p, o: p.changed(o, remote_block_ids=(o.blocks[:1],)),
    "too many blocks": lambda p, o: p.changed(o, remote_block_ids=((*o.blocks, 1),)),
    "no blocks": lambda p, o: p.changed(o, remote_block_ids=((),)),
    "two groups": lambda p, o: p.changed(o, remote_block_ids=(o.blocks, o.blocks)),
    "a slot beyond the table": lambda p, o: p.changed(o, ticket={"lease_slot": SETTINGS.lease_slots}),
    "the largest slot": lambda p, o: p.changed(o, ticket={"lease_slot": 2**24 - 1}),
}


@pytest.mark.parametrize("change", SIGNED_BUT_WRONG.values(), ids=SIGNED_BUT_WRONG)
def test_signed_params_that_do_not_fit_the_engines_fail_as_params(rig: Rig, change: Change) -> None:
    producer, consumer = rig.pair()
    params = change(producer, producer.prefill(TOKENS))
    assert _fails(rig, producer, consumer, params) is FailureReason.PARAMS


def test_another_epoch_is_no_lease(rig: Rig) -> None:
    producer, consumer = rig.pair()
    params = producer.changed(producer.prefill(TOKENS), ticket={"lease_epoch": "0" * 14 + "1"})
    assert _fails(rig, producer, consumer, params) is FailureReason.FENCE


def test_the_slot_of_another_lease_with_the_own_epoch_is_no_lease(rig: Rig) -> None:
    producer, consumer = rig.pair()
    victim, own = producer.prefill(TOKENS, seed=1), producer.prefill(TOKENS, seed=2)
    params = producer.changed(own, ticket={"lease_slot": victim.slot})
    assert _fails(rig, producer, consumer, params) is FailureReason.FENCE


CHANGED: dict[str, dict[str, Any]] = {
    "another request's blocks": {"remote_block_ids": ((1, 2, 3),)},
    "more tokens": {"remote_num_tokens": TOKENS + 1},
    "another request": {"remote_request_id": "another-request"},
    "another size": {"tp_size": 2},
}


@pytest.mark.parametrize("fields", CHANGED.values(), ids=CHANGED)
def test_params_that_a_client_has_changed_fail_by_their_mac(rig: Rig, fields: dict[str, Any]) -> None:
    producer, consumer = rig.pair()
    params = msgspec.structs.replace(producer.prefill(TOKENS).params, **fields)
    assert _fails(rig, producer, consumer, params) is FailureReason.MAC


@pytest.mark.parametrize("field", ["lease_slot", "lease_s", "mac"])
def test_tickets_that_a_client_has_changed_fail_by_their_mac(rig: Rig, field: str) -> None:
    producer, consumer = rig.pair()
    offer = producer.prefill(TOKENS)
    values = {"lease_slot": offer.slot + 1, "lease_s": 10_000.0, "mac": "f" * 64}
    ticket = msgspec.structs.replace(offer.params.kvferry, **{field: values[field]})
    params = msgspec.structs.replace(offer.params, kvferry=ticket)
    assert _fails(rig, producer, consumer, params) is FailureReason.MAC


def test_a_mac_under_a_key_that_the_client_chose_is_refused(rig: Rig) -> None:
    producer, consumer = rig.pair()
    params = sign_params(producer.prefill(TOKENS).params, b"x" * 32)
    assert _fails(rig, producer, consumer, params) is FailureReason.MAC


def test_orders_of_which_one_is_wrong_do_not_spoil_the_others(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    offers = [producer.prefill(TOKENS, seed=seed) for seed in range(4)]
    wrong = producer.changed(offers[1], remote_block_ids=((10**6,),))
    loads = [consumer.load(wrong if index == 1 else offer.params) for index, offer in enumerate(offers)]
    assert [any_rig.until_over(consumer, load) for load in loads] == [None, FailureReason.PARAMS, None, None]
    for index in (0, 2, 3):
        assert consumer.has_bytes(loads[index], seed=index)
    untouched = consumer.caches.cells(0)[list(loads[1].blocks)]
    assert (untouched == POISON).all()
