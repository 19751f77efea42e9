"""The record of a load: when each of its stages ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.results import LoadRecord, Stage
from kvferry.worker.peers.peer import PeerKey
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.rig import Rig


def test_the_stages_of_a_good_load_follow_each_other_and_fill_its_time(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair()
    any_rig.transfer(producer, consumer)
    (load,) = consumer.seen.load_records
    assert load.reason is None
    lasted_s = load.lasted_s()
    assert list(lasted_s) == list(Stage)
    assert all(one >= 0 for one in lasted_s.values())
    assert sum(lasted_s.values()) == pytest.approx(load.load_s)


def test_a_first_load_spends_its_time_on_connecting_to_its_producer(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    rig.transfer(producer, consumer, seed=2)
    first, second = (load.lasted_s()[Stage.CONNECTING] for load in consumer.seen.load_records)
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


def test_a_stage_that_has_not_ended_has_no_length() -> None:
    load = LoadRecord(request_id="r", source=PeerKey("host", 1, "engine", "0" * 32), ordered_s=5.0)
    load.go_on(Stage.CONNECTING, 7.0)
    assert (load.lasted_s(), load.load_s) == ({Stage.QUEUED: 2.0}, 0.0)
    load.end(7.5)
    assert (load.lasted_s(), load.load_s) == ({Stage.QUEUED: 2.0, Stage.CONNECTING: 0.5}, 2.5)
