"""Prompts that are read while they are computed: whatever happens meanwhile, the bytes are right or the load fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.orders import FailureReason
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import HOST
from tests.harness.cache_engine import CacheEngine
from tests.harness.caches import ToyCaches
from tests.harness.engine import POISON, Engine
from tests.harness.rig import Rig, rig_of
from tests.waiting import step_until, wait_until
from tests.worker.engines.streams import STREAMS, ServedStream, pair


@pytest.mark.parametrize("shared", [False, True], ids=["read", "mapped"])
def test_a_prompt_is_read_part_by_part_while_it_is_computed(
    any_rig: Rig, shared: bool
) -> None:
    producer, consumer = pair(any_rig, shared=shared)
    stream = ServedStream.begin(any_rig, producer, consumer, tokens=30, first=5)
    stream.order()
    stream.compute_rest(8)
    stream.check()
    record = stream.record()
    assert [stop for stop, _, _ in record.chunks] == [12, 20, 28, 30]
    assert all(begun_s <= ended_s for _, begun_s, ended_s in record.chunks)
    assert record.planned_bytes == 8 * consumer.shape.block_bytes
    assert record.early_bytes == 7 * consumer.shape.block_bytes
    assert record.restarts == 0
    any_rig.step_until(
        lambda: stream.prefill.request_id in producer.seen.sent, "the producer is told"
    )
    if shared:
        assert record.mapped_bytes == record.planned_bytes
        # Neither slots nor rows: those of the first contact alone.
        assert consumer.fabric.calls["post_read"] == 2
        assert consumer.all_entries_are_free()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_worker_without_caches_ends_its_part_of_a_load(
    any_rig: Rig, streamed: bool
) -> None:
    """A pipeline stage whose layers have none: its plan reads from nobody."""
    producer = any_rig.engine("P", settings=STREAMS)
    shape = producer.shape
    consumer = CacheEngine(
        "C",
        any_rig.make_fabric,
        [
            (Place(), ToyCaches(shape, POISON).kv),
            (Place(pp=1), KvCaches((), (), HOST)),
        ],
        (shape.group,),
        Topology(pp=2),
        settings=STREAMS,
    )
    prefill = producer.begin_prefill(tokens=10, seed=1)
    producer.step()
    if streamed:
        prefill.offer()
    producer.compute(prefill, 10)
    producer.step()
    prefill.end()
    assert prefill.params is not None
    blocks = tuple(range(1, 1 + len(prefill.blocks)))
    consumer.order_load("d", prefill.params, 0, 10, lambda _: (blocks,))
    step_until(
        lambda: consumer.seen.is_over("d"), "its load is over", producer, consumer
    )
    assert "d" in consumer.seen.loaded
    step_until(lambda: prefill.request_id in producer.seen.sent, "it is told", producer)
    consumer.close()


def test_a_streamed_load_that_waits_for_more_holds_no_place_and_no_memory(
    rig: Rig,
) -> None:
    producer, consumer = pair(rig, settings=replace(STREAMS, max_loads=1))
    other = rig.engine("Q")
    stream = ServedStream.begin(rig, producer, consumer, tokens=30, first=5)
    stream.order()
    stream.compute(8)
    stream.until_read(13)
    wait_until(consumer.parked_loads, "it waits")
    ready = consumer.load(other.prefill(tokens=9, seed=3).params)
    rig.step_until(
        lambda: consumer.seen.is_over(ready.request_id),
        "the other one is loaded",
        only=consumer,
    )
    stream.compute_rest(8)
    assert stream.over() is None


class AtPost:
    """Does something on the consumer's transfer thread before its read with this number is posted."""

    def __init__(
        self, consumer: Engine, number: int, action: Callable[[], None]
    ) -> None:
        self.left, self.happened = number, False
        self._post, self._action = consumer.fabric.post_read, action
        consumer.fabric.post_read = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any) -> Any:
        if self.left == 0:
            self._action()
            self.happened = True
        self.left -= 1
        return self._post(*args)


POINTS = 16
"""Reads of a load in three parts, those that only look at the slot not counted one by one."""


@pytest.mark.parametrize(("kind", "times"), [("memory", 3), ("nixl", 1)])
@pytest.mark.parametrize("point", range(POINTS))
def test_a_prompt_that_is_preempted_at_any_moment_is_read_anew_and_right(
    kind: str, times: int, point: int
) -> None:
    """Again and again: each time the consumer begins with the first token, under another epoch."""
    with rig_of(kind) as rig:
        producer, consumer = pair(rig)
        rig.transfer(producer, consumer)
        stream = ServedStream.begin(rig, producer, consumer, tokens=22, first=3)
        stream.compute(7)
        at = AtPost(consumer, point, stream.preempt)
        stream.order()
        wait_until(lambda: at.happened, "it is preempted")
        for _ in range(times - 1):
            stream.compute(6)
            at = AtPost(consumer, point, stream.preempt)
            wait_until(lambda at=at: at.happened, "it is preempted again")  # type: ignore[misc]
        assert not consumer.seen.failed
        stream.compute_rest(6)
        assert stream.over() is None
        assert consumer.has_bytes(stream.load, stream.prefill.seed)  # type: ignore[arg-type]
        assert times == 1 or stream.record().restarts >= 1


@pytest.mark.parametrize("point", range(POINTS + 8))
def test_a_lease_that_ends_at_any_moment_fails_the_load(rig: Rig, point: int) -> None:
    producer, consumer = pair(rig)
    rig.transfer(producer, consumer)
    stream = ServedStream.begin(rig, producer, consumer, tokens=22, first=3)
    stream.compute(7)
    at = AtPost(consumer, point, stream.abort)
    stream.order()
    wait_until(lambda: at.happened, "it is aborted")
    rig.step_until(lambda: consumer.seen.failed, "the load fails", only=consumer)
    assert set(consumer.seen.failed.values()) == {FailureReason.FENCE}
    assert len(consumer.seen.loaded) == 1, "only the one before"


@pytest.mark.parametrize("point", range(12))
def test_a_lease_that_ends_after_the_prompt_is_complete_fails_the_load_or_comes_too_late(
    rig: Rig, point: int
) -> None:
    producer, consumer = pair(rig)
    stream = ServedStream.begin(rig, producer, consumer, tokens=22, first=3)
    stream.compute(7)
    stream.order()
    stream.until_read(10)
    reported = []
    notified = consumer.fabric.calls["notify"]

    def abort() -> None:
        # A load is reported before its producer is notified, and then reads once more, behind the message.
        reported.append(consumer.fabric.calls["notify"] > notified)
        stream.abort()

    producer.compute(stream.prefill, 12)
    producer.step()
    at = AtPost(consumer, point, abort)
    rig.step_until(
        lambda: consumer.seen.loaded or consumer.seen.failed,
        "it is over",
        only=consumer,
    )
    if at.happened and reported == [False]:
        assert list(consumer.seen.failed.values()) == [FailureReason.FENCE]
    else:
        assert consumer.seen.loaded
        consumer.check_bytes(stream.load, stream.prefill.seed)  # type: ignore[arg-type]
        if not at.happened:
            stream.prefill.end()
