"""The record of a load: when each of its stages ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.record import Stage, StageTimes
from kvferry.worker.peers.peer import PeerKey
from tests.worker.engine_rig import SETTINGS, Rig
from tests.worker.toy_caches import CacheShape


def test_the_stages_of_a_good_load_follow_each_other_and_fill_its_time(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    any_rig.transfer(producer, consumer)
    (load,) = consumer.seen.load_records
    assert load.reason is None
    assert load.totals is not None
    assert list(load.times.ended_s) == list(Stage)
    lasted = [load.times.lasted_s(stage) for stage in Stage]
    assert all(one is not None and one >= 0 for one in lasted)
    assert sum(one or 0.0 for one in lasted) == pytest.approx(load.totals.load_s, abs=1e-3)


def test_a_first_load_spends_its_time_on_connecting_to_its_producer(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    rig.transfer(producer, consumer, seed=2)
    first, second = (load.times.lasted_s(Stage.CONNECTING) or 0.0 for load in consumer.seen.load_records)
    assert first > second


def test_the_record_of_a_failed_load_has_the_stage_in_which_it_failed(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    offer = producer.prefill(tokens=10)
    producer.give_away(offer)
    ordered = consumer.load(offer.params)
    assert any_rig.until_over(consumer, ordered) is FailureReason.FENCE
    (load,) = consumer.seen.load_records
    assert (load.request_id, load.source, load.reason) == (
        ordered.request_id,
        PeerKey.of(offer.params),
        FailureReason.FENCE,
    )
    assert load.times.stage is Stage.FENCE
    assert list(load.times.ended_s) == [Stage.QUEUED, Stage.CONNECTING, Stage.FENCE]


def test_what_is_put_in_place_is_timed(rig: Rig) -> None:
    staged = replace(SETTINGS, staging_pool_bytes=16 << 10, direct_min_bytes=1 << 20)
    producer = rig.engine("P", shape=CacheShape(axes="bht", blocks=48), settings=staged)
    consumer = rig.engine("C", shape=CacheShape(axes="thb", blocks=40), settings=staged)
    rig.transfer(producer, consumer)
    (load,) = consumer.seen.load_records
    assert load.totals is not None
    assert load.totals.staged_bytes > 0
    assert 0 < load.times.relayout_s <= (load.times.lasted_s(Stage.READING) or 0.0)


def test_a_stage_that_has_not_ended_has_no_length() -> None:
    times = StageTimes(ordered_s=5.0)
    times.go_on(Stage.CONNECTING, 7.0)
    assert times.lasted_s(Stage.QUEUED) == 2.0
    assert times.lasted_s(Stage.CONNECTING) is None
    times.end(7.5)
    assert times.lasted_s(Stage.CONNECTING) == 0.5
