"""Failed reads from a producer that lives: memory that they might still write stays out of use for a grace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.link import limits
from kvferry.link.limits import Backoff
from kvferry.protocol.orders import FailureReason
from kvferry.worker.fabric.errors import TransferFailed
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.inside import memory_of, thread_of
from tests.harness.integrity import check_worker
from tests.harness.rig import Rig
from tests.promises import promise
from tests.waiting import wait_until

NEVER_S = 3600.0
CAUTIOUS = replace(SETTINGS, failed_read_grace_s=NEVER_S)
STAGED = replace(CAUTIOUS, staging_pool_bytes=8 << 10, direct_min_bytes=1 << 20)


def _is_quarantined(rig: Rig, consumer: Engine, load: OrderedLoad) -> None:
    """Whether the load has failed with TRANSFER and its blocks stay out of use."""
    assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    assert consumer.seen.alive == {load.request_id}
    check_worker(consumer.worker)


def _grace_is_over(rig: Rig, consumer: Engine) -> None:
    thread_of(consumer.worker).reader.grace_s = 0.0
    rig.step_until(lambda: not consumer.seen.alive, "the grace is over")
    check_worker(consumer.worker, idle=True)
    consumer.step()  # the end of a grace is counted after the blocks were given back, maybe for a step of its own
    assert consumer.seen.counts["graces_over"] >= 1


@promise(2)
def test_blocks_of_a_read_that_failed_halfway_stay_out_of_use_for_the_grace(
    rig: Rig,
) -> None:
    producer, consumer = rig.pair(settings=CAUTIOUS)
    rig.transfer(producer, consumer)
    name = producer.fabric.agent_name
    consumer.fabric.on_data_read = lambda: rig.network.fail_reads(name)
    load = consumer.load(producer.prefill(tokens=10).params)
    _is_quarantined(rig, consumer, load)
    assert consumer.fabric.transfers() == 1, "it is not released before"
    assert consumer.seen.counts["quarantined_loads"] == 1
    assert consumer.seen.counts["quarantined_blocks"] == len(load.blocks)
    rig.transfer(producer, consumer)  # the producer lives, and others go on
    assert consumer.seen.alive == {load.request_id}
    _grace_is_over(rig, consumer)


@promise(2)
@pytest.mark.parametrize(
    "error",
    [TransferFailed("test", "of the test"), RuntimeError("a bug")],
    ids=["failed", "bug"],
)
def test_a_post_that_raises_may_have_posted_something(
    rig: Rig, error: Exception
) -> None:
    producer, consumer = rig.pair(settings=CAUTIOUS)
    rig.transfer(producer, consumer)
    consumer.fabric.fail("post_data_read", lambda: error)
    load = consumer.load(producer.prefill(tokens=10).params)
    _is_quarantined(rig, consumer, load)
    assert consumer.fabric.transfers() == 0
    _grace_is_over(rig, consumer)


@promise(2)
@pytest.mark.parametrize("how", ["the post raises", "the read fails"])
def test_a_wave_of_the_staging_pool_stays_out_of_use_as_well(
    rig: Rig, how: str
) -> None:
    producer = rig.engine("P", shape=CacheShape(axes="bht"), settings=STAGED)
    consumer = rig.engine("C", shape=CacheShape(axes="bth"), settings=STAGED)
    rig.transfer(producer, consumer)
    if how == "the post raises":
        consumer.fabric.fail(
            "post_data_read", lambda: TransferFailed("test", "of the test")
        )
    else:
        consumer.fabric.on_data_read = lambda: rig.network.fail_reads(
            producer.fabric.agent_name
        )
    load = consumer.load(producer.prefill(tokens=30).params)
    _is_quarantined(rig, consumer, load)
    assert consumer.pool.snapshot().quarantined_bytes > 0
    rig.transfer(producer, consumer, tokens=30)
    _grace_is_over(rig, consumer)
    assert consumer.pool.free_bytes == consumer.pool.capacity


@pytest.mark.parametrize("how", ["the post raises", "the read fails"])
def test_a_first_read_that_failed_keeps_its_entry_for_the_grace(
    rig: Rig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "AVOID", Backoff(0.01, 30.0))
    producer, consumer = rig.pair(settings=CAUTIOUS)
    if how == "the post raises":
        consumer.fabric.fail("post_read", lambda: TransferFailed("test", "of the test"))
    else:
        rig.network.fail_reads(producer.fabric.agent_name)
    load = consumer.load(producer.prefill(tokens=10).params)
    assert rig.until_over(consumer, load) is FailureReason.HANDSHAKE
    slot_reads, registry = (
        memory_of(consumer.worker).slot_reads,
        thread_of(consumer.worker).registry,
    )
    assert slot_reads.free() == len(slot_reads.words) - 1
    assert registry.first_reads.given_up
    check_worker(consumer.worker)
    thread_of(consumer.worker).reader.grace_s = 0.0
    wait_until(lambda: not registry.first_reads.given_up, "the grace is over", 60.0)
    check_worker(consumer.worker, idle=True)
