"""Loads that go well: the right bytes in the right places, each side notified once, every stage timed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import EMPTY, SlotState, epoch_from_text, slot_word
from kvferry.worker.loads.results import Stage
from kvferry.worker.peers.peer import PeerKey
from tests.fakes.device_mark import FakeClock
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Offer
from tests.harness.ledgers import check_leases
from tests.harness.rig import Rig
from tests.waiting import wait_until

SHAPES = {
    "heads outermost": CacheShape(axes="hbt"),
    "tokens outermost, with gaps": CacheShape(axes="tbh", gap_bytes=24),
    "all layers in one allocation, heads of a token together": CacheShape(
        axes="bth", one_storage=True
    ),
    "two tokens a cell": CacheShape(tile_tokens=2, cell_bytes=32),
    "a whole block a cell": CacheShape(tile_tokens=4, cell_bytes=64),
    "two kernel blocks a scheduler block": CacheShape(ratio=2),
}


def word_of(offer: Offer, state: SlotState) -> int:
    return slot_word(epoch_from_text(offer.params.kvferry.lease_epoch), state)


def test_a_load_brings_every_byte_and_both_sides_are_notified_once(
    any_rig: Rig,
) -> None:
    producer, consumer = any_rig.pair()
    offer = producer.prefill(tokens=10, seed=7)
    load = consumer.load(offer.params)
    assert any_rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=7)
    any_rig.step_until(lambda: producer.seen.sent, "the producer is notified")
    assert producer.word(offer) == EMPTY
    for _ in range(20):
        producer.step()
        consumer.step()
    assert producer.seen.sent == [offer.request_id]
    assert consumer.seen.loaded == [load.request_id]
    wait_until(lambda: consumer.fabric.transfers() == 0, "its message is flushed")
    check_leases(producer.leases)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [1, 8, 9, 15])
def test_strides_and_lengths_do_not_matter(
    rig: Rig, shape: CacheShape, tokens: int
) -> None:
    producer, consumer = rig.pair(shape=shape)
    offer = producer.prefill(tokens=tokens, seed=tokens)
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is None
    expected = load.before
    whole_cells = (
        shape.tiles == 1
    )  # cannot be cleared in part: they come with whatever the producer has behind
    consumer.caches.write_into(
        expected, load.blocks, 0, tokens, tokens, tail=None if whole_cells else 0
    )
    for found, wanted in zip(consumer.caches.memory, expected, strict=True):
        assert (found == wanted).all()


def test_what_the_consumer_has_already_is_neither_read_nor_touched(
    any_rig: Rig,
) -> None:
    producer, consumer = any_rig.pair()
    offer = producer.prefill(tokens=22, seed=3)
    load = consumer.load(offer.params, local_tokens=12)
    assert any_rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)
    assert (consumer.caches.cells(0)[list(load.blocks[:3])] == 0xA5).all()
    (totals,) = consumer.seen.totals
    assert (
        totals.planned_bytes
        == totals.transferred_bytes
        == 3 * consumer.shape.block_bytes
    )
    assert totals.descriptors > 0
    assert totals.load_s > 0


def test_a_load_waits_while_the_producer_still_computes(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    request_id = producer.start_prefill(tokens=10, seed=2)
    offer = producer.finish_prefill(request_id)
    assert producer.word(offer) == word_of(offer, SlotState.COMPUTING)
    producer.caches.fill(
        offer.blocks, 0x11
    )  # the last layers have not been written yet
    load = consumer.load(offer.params)
    any_rig.step_until(
        lambda: consumer.fabric.calls["post_read"] > 5,
        "the slot is asked again",
        only=consumer,
    )
    assert consumer.fabric.calls["post_data_read"] == 0
    assert consumer.fabric.transfers() <= 1, "every look gives its handle back"
    assert not consumer.seen.loaded
    producer.caches.write(offer.blocks, offer.tokens, offer.seed)
    assert any_rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=2)


def test_a_slot_says_ready_only_when_the_device_has_finished_with_the_blocks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    device = FakeClock()
    monkeypatch.setattr(producer.worker, "_device", device)
    offer = producer.prefill(tokens=5)
    load = consumer.load(offer.params)
    rig.step_until(
        lambda: consumer.fabric.calls["post_read"] > 5, "the slot is asked again"
    )
    assert producer.word(offer) == word_of(offer, SlotState.COMPUTING)
    device.reach()
    assert rig.until_over(consumer, load) is None


def test_nothing_is_read_into_blocks_that_the_device_may_still_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    device = FakeClock()
    monkeypatch.setattr(consumer.worker, "_device", device)
    reads = consumer.fabric.calls["post_read"]
    load = consumer.load(producer.prefill(tokens=5, seed=4).params)
    wait_until(
        lambda: any(mark.asked > 10 for mark in device.marks), "the device is asked"
    )
    assert consumer.fabric.calls["post_read"] == reads
    device.reach()
    assert rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=4)


def test_more_loads_than_may_run_at_once_take_their_turn(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair(settings=replace(SETTINGS, max_loads=2))
    offers = [producer.prefill(tokens=9, seed=seed) for seed in range(8)]
    loads = [consumer.load(offer.params) for offer in offers]
    any_rig.step_until(lambda: len(consumer.seen.loaded) == 8, "all are loaded")
    assert all(
        consumer.has_bytes(load, offer.seed)
        for load, offer in zip(loads, offers, strict=True)
    )
    any_rig.step_until(lambda: len(producer.seen.sent) == 8, "all blocks are free")


def test_the_stages_of_a_good_load_follow_each_other_and_fill_its_time(
    any_rig: Rig,
) -> None:
    producer, consumer = any_rig.pair()
    any_rig.transfer(producer, consumer)
    (load,) = consumer.seen.load_records
    assert load.reason is None
    lasted_s = load.lasted_s()
    assert list(lasted_s) == list(Stage)
    assert all(one >= 0 for one in lasted_s.values())
    assert sum(lasted_s.values()) == pytest.approx(load.load_s)


def test_the_record_of_a_failed_load_has_the_stage_in_which_it_failed(
    any_rig: Rig,
) -> None:
    producer, consumer = any_rig.pair()
    offer = producer.prefill(tokens=10)
    producer.give_away(offer)
    ordered = consumer.load(offer.params)
    assert any_rig.until_over(consumer, ordered) is FailureReason.FENCE
    (load,) = consumer.seen.load_records
    params = offer.params
    source = PeerKey(
        params.remote_host, params.remote_port, params.engine_id, params.kvferry.boot
    )
    assert (load.request_id, load.source, load.reason) == (
        ordered.request_id,
        source,
        FailureReason.FENCE,
    )
    assert load.stage is Stage.FENCE
    assert list(load.ended_s) == [Stage.QUEUED, Stage.CONNECTING, Stage.FENCE]


def test_what_is_put_in_place_is_timed(rig: Rig) -> None:
    staged = replace(SETTINGS, staging_pool_bytes=16 << 10, direct_min_bytes=1 << 20)
    producer = rig.engine("P", shape=CacheShape(axes="bht", blocks=48), settings=staged)
    consumer = rig.engine("C", shape=CacheShape(axes="thb", blocks=40), settings=staged)
    rig.transfer(producer, consumer)
    (load,) = consumer.seen.load_records
    assert load.staged_bytes > 0
    assert 0 < load.relayout_s <= load.lasted_s()[Stage.READING]
