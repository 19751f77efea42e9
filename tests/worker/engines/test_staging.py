"""Loads through the staging pool: the same bytes in the same places, wave by wave, and nothing of the pool is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.staging import staged_reads
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.integrity import pool_errors
from tests.harness.rig import Rig

POOL_BYTES = 8 << 10
STAGED = replace(SETTINGS, staging_pool_bytes=POOL_BYTES, direct_min_bytes=1 << 20)
"""Descriptors cost much, and a wave holds seven blocks of one layer."""

HEADS_OUTER = CacheShape(axes="bht")
TOKENS_OUTER = CacheShape(axes="bth")
PAIRS = {
    "HND to NHD": (HEADS_OUTER, TOKENS_OUTER),
    "NHD to HND": (TOKENS_OUTER, HEADS_OUTER),
    "HND to NHD, block 4 to 8": (
        HEADS_OUTER,
        CacheShape(axes="bth", block_tokens=8, blocks=24),
    ),
    "HND to NHD, block 8 to 4": (CacheShape(block_tokens=8, blocks=24), TOKENS_OUTER),
    "NHD to HND, block 12 to 8": (
        CacheShape(axes="bth", block_tokens=12, blocks=24),
        CacheShape(block_tokens=8),
    ),
    "heads far apart": (CacheShape(axes="hbt"), CacheShape(axes="tbh", gap_bytes=24)),
    "two kernel blocks a scheduler block": (
        CacheShape(ratio=2),
        CacheShape(axes="bth", block_tokens=8, blocks=24),
    ),
}


def staged_pair(
    rig: Rig, here: CacheShape, there: CacheShape, settings: WorkerSettings
) -> tuple[Engine, Engine]:
    """A producer with the first shape and a consumer with the second."""
    return rig.engine("P", shape=here, settings=settings), rig.engine(
        "C", shape=there, settings=settings
    )


def assert_the_pool_is_whole(consumer: Engine) -> None:
    assert pool_errors(consumer.pool.snapshot()) == []
    assert consumer.pool.free_bytes == consumer.pool.capacity
    assert not consumer.pool.waiting


@pytest.mark.parametrize(
    ("producer_shape", "consumer_shape"), PAIRS.values(), ids=PAIRS
)
def test_what_is_staged_arrives_byte_by_byte(
    any_rig: Rig, producer_shape: CacheShape, consumer_shape: CacheShape
) -> None:
    producer, consumer = staged_pair(any_rig, producer_shape, consumer_shape, STAGED)
    for tokens in (1, 8, 23, 64):
        any_rig.transfer(producer, consumer, tokens=tokens, seed=tokens)
        totals = consumer.seen.totals[-1]
        assert totals.staged_bytes == totals.planned_bytes > 0
    assert totals.waves > 1
    assert totals.transferred_bytes in (
        totals.planned_bytes,
        0,
    )  # the fake has no telemetry
    assert_the_pool_is_whole(consumer)


def test_a_larger_pool_has_more_waves_and_not_larger_ones_than_the_kernels_tables_are_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = staged_pair(
        rig, HEADS_OUTER, TOKENS_OUTER, replace(STAGED, staging_pool_bytes=1 << 20)
    )
    rig.transfer(producer, consumer, tokens=64)
    assert consumer.seen.totals[-1].waves == 1
    monkeypatch.setattr(staged_reads, "MAX_WAVE_BYTES", 4 * HEADS_OUTER.block_bytes)
    rig.transfer(producer, consumer, tokens=64, seed=2)
    assert consumer.seen.totals[-1].waves > 1
    assert_the_pool_is_whole(consumer)


def test_many_large_loads_share_a_small_pool_and_all_of_them_end_well(rig: Rig) -> None:
    rig.network.polls_to_complete = 2
    shape = replace(HEADS_OUTER, blocks=240)
    first, second = (
        rig.engine(name, shape=shape, settings=STAGED) for name in ("P", "Q")
    )
    consumer = rig.engine("C", shape=replace(TOKENS_OUTER, blocks=600), settings=STAGED)
    loads: list[tuple[OrderedLoad, int]] = []
    for seed in range(1, 13):
        producer = first if seed % 2 else second
        loads.append(
            (consumer.load(producer.prefill(tokens=100, seed=seed).params), seed)
        )
    rig.step_until(
        lambda: len(consumer.seen.loaded) == len(loads),
        "all loads are good",
        timeout_s=30.0,
    )
    for load, seed in loads:
        assert consumer.has_bytes(load, seed)
    assert_the_pool_is_whole(consumer)


def test_a_wave_that_may_still_be_written_stays_in_quarantine_until_its_read_has_ended(
    rig: Rig,
) -> None:
    producer, consumer = staged_pair(rig, HEADS_OUTER, TOKENS_OUTER, STAGED)
    rig.transfer(producer, consumer, tokens=10)
    consumer.set_timeouts(load_s=0.3)
    rig.network.polls_to_complete = 3
    offer = producer.prefill(tokens=60)
    consumer.fabric.on_data_read = lambda: rig.network.freeze(
        producer.fabric.agent_name
    )
    load = consumer.load(offer.params)
    assert rig.until_over(consumer, load) is FailureReason.DEADLINE
    assert consumer.seen.alive == {load.request_id}
    pool = consumer.pool.snapshot()
    assert 0 < pool.quarantined_bytes <= pool.used_bytes
    consumer.fabric.on_data_read = lambda: None
    consumer.set_timeouts()
    rig.network.thaw(producer.fabric.agent_name)
    rig.step_until(lambda: not consumer.seen.alive, "the read has ended")
    assert_the_pool_is_whole(consumer)
    rig.transfer(producer, consumer, tokens=40, seed=3)
