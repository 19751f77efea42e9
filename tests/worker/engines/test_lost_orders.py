"""Orders that cannot be decoded, a bug of this engine: their loads fail, and everything else goes on."""

from __future__ import annotations

import pytest

from kvferry.protocol.ids import SlotState, epoch_from_text, slot_word
from kvferry.protocol.orders import FailureReason, LeaseOpen, StepOrders, encode_head, encode_orders
from tests.harness.rig import Rig

EPOCH = "0" * 14 + "7"


def test_loads_of_orders_that_cannot_be_read_fail_and_later_ones_are_good(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    params = producer.prefill(10).params
    assert consumer.loads.offer("lost", params, 10, 0.0) is None
    blocks = consumer._take_blocks(10)
    consumer.loads.allocated("lost", consumer.loads.matched_tokens("lost", 0), (blocks,))
    orders = StepOrders(boot=consumer.boot, loads=consumer.loads.take_orders())
    consumer.worker.carry_out(encode_head(orders), encode_orders(orders)[:-3])
    rig.step_until(lambda: consumer.seen.failed, "the load has failed")
    assert consumer.seen.failed == {"lost": FailureReason.ORDERS}
    assert consumer.seen.counts["lost_orders"] == 1
    assert not consumer.seen.alive
    consumer.loads.finished("lost")
    rig.transfer(producer, consumer, seed=3)


@pytest.mark.parametrize("head", [b"", b"\xc1", encode_orders(StepOrders(boot="0" * 32))[:-1]])
def test_a_head_that_cannot_be_read_is_counted_and_stops_nothing_else(rig: Rig, head: bytes) -> None:
    producer, consumer = rig.pair()
    consumer.worker.carry_out(head, encode_orders(StepOrders(boot=consumer.boot)))
    assert consumer.collect()[0].counts["lost_orders"] == 1
    assert consumer.collect()[0].counts["lost_orders"] == 0
    rig.transfer(producer, consumer)


def test_leases_are_open_when_the_orders_have_been_handed_over_even_if_the_rest_is_lost(rig: Rig) -> None:
    engine = rig.engine("P")
    opened = StepOrders(boot=engine.boot, opens=(LeaseOpen(slot=3, epoch=EPOCH),))
    engine.worker.carry_out(encode_head(opened), b"\xc1")
    assert int(engine.worker._memory.table.words[3]) == slot_word(epoch_from_text(EPOCH), SlotState.COMPUTING)
    rig.step_until(lambda: engine.seen.counts["lost_orders"], "the loss is counted")
