"""Prompts that are read while they are computed: whatever happens meanwhile, the bytes are right or the load fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.orders import FailureReason
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.inside import thread_of
from tests.harness.rig import Rig, rig_of
from tests.waiting import wait_until
from tests.worker.engines.streams import STREAMS, ServedStream, pair
from tests.worker.engines.test_staging import PAIRS, STAGED


def test_a_prompt_is_read_part_by_part_while_it_is_computed(any_rig: Rig) -> None:
    producer, consumer = pair(any_rig)
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


def test_a_streamed_load_that_waits_for_more_holds_no_place_and_no_memory(rig: Rig) -> None:
    producer, consumer = pair(rig, settings=replace(STREAMS, max_loads=1))
    other = rig.engine("Q")
    stream = ServedStream.begin(rig, producer, consumer, tokens=30, first=5)
    stream.order()
    stream.compute(8)
    stream.until_read(13)
    wait_until(consumer.parked_loads, "it waits")
    ready = consumer.load(other.prefill(tokens=9, seed=3).params)
    rig.step_until(
        lambda: consumer.seen.is_over(ready.request_id), "the other one is loaded", only=consumer
    )
    stream.compute_rest(8)
    assert stream.over() is None


SHAPES = {
    "alike": (CacheShape(), CacheShape(), STREAMS),
    "blocks of 4 and 8": (CacheShape(), CacheShape(block_tokens=8, blocks=24), STREAMS),
    "blocks of 8 and 4": (CacheShape(block_tokens=8, blocks=24), CacheShape(), STREAMS),
    "two kernel blocks a scheduler block": (CacheShape(ratio=2), CacheShape(), STREAMS),
    **{
        f"staged, {name}": (*shapes, replace(STAGED, row_blocks=(40,)))
        for name, shapes in PAIRS.items()
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("here", "there", "settings"), SHAPES.values(), ids=SHAPES)
def test_any_parts_of_any_geometry_are_the_same_bytes_as_the_whole(
    rig: Rig, here: CacheShape, there: CacheShape, settings: Any, seed: int
) -> None:
    draw = random.Random(seed)
    producer, consumer = (
        rig.engine("P", shape=here, settings=settings),
        rig.engine("C", shape=there, settings=settings),
    )
    for _ in range(3):
        tokens = draw.randint(9, 60)
        stream = ServedStream.begin(
            rig, producer, consumer, tokens, first=draw.randint(1, 8), seed=draw.randint(1, 99)
        )
        local = draw.choice([0, 0, there.group.block_tokens])
        stream.order(
            local_tokens=min(local, tokens - 1)
            // there.group.block_tokens
            * there.group.block_tokens
        )
        while not stream.prefill.is_complete:
            stream.compute(min(draw.randint(1, 13), tokens - stream.prefill.done))
            if draw.random() < 0.7 and not stream.prefill.is_complete:
                consumer.step()
        stream.prefill.end()
        stream.check()
        assert stream.load is not None
        consumer.free(stream.load)
        rig.step_until(
            lambda s=stream: s.prefill.request_id in producer.seen.sent,  # type: ignore[misc]
            "its blocks are free",
        )


class AtPost:
    """Does something on the consumer's transfer thread before its read with this number is posted."""

    def __init__(self, consumer: Engine, number: int, action: Callable[[], None]) -> None:
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


@pytest.mark.parametrize("kind", ["memory", "nixl"])
@pytest.mark.parametrize("point", range(POINTS))
def test_a_prompt_that_is_preempted_at_any_moment_is_read_anew_and_right(
    kind: str, point: int
) -> None:
    with rig_of(kind) as rig:
        producer, consumer = pair(rig)
        rig.transfer(producer, consumer)
        stream = ServedStream.begin(rig, producer, consumer, tokens=22, first=3)
        stream.compute(7)
        at = AtPost(consumer, point, stream.preempt)
        stream.order()
        wait_until(lambda: at.happened, "it is preempted")
        assert not consumer.seen.failed
        stream.compute_rest(6)
        assert stream.over() is None
        assert consumer.has_bytes(stream.load, stream.prefill.seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("point", range(POINTS))
def test_a_prompt_that_is_preempted_again_and_again_is_read_right(rig: Rig, point: int) -> None:
    producer, consumer = pair(rig)
    stream = ServedStream.begin(rig, producer, consumer, tokens=22, first=3)
    stream.compute(7)
    stream.order()
    for _ in range(3):
        at = AtPost(consumer, point, stream.preempt)
        wait_until(lambda at=at: at.happened, "it is preempted")  # type: ignore[misc]
        stream.compute(6)
    stream.compute_rest(6)
    assert stream.over() is None
    assert consumer.has_bytes(stream.load, stream.prefill.seed)  # type: ignore[arg-type]
    assert stream.record().restarts >= 1


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
    thread = thread_of(consumer.worker)
    reported = []

    def abort() -> None:
        reported.append(bool(thread.results.snapshot().loaded or consumer.seen.loaded))
        stream.abort()

    producer.compute(stream.prefill, 12)
    producer.step()
    at = AtPost(consumer, point, abort)
    rig.step_until(
        lambda: consumer.seen.loaded or consumer.seen.failed, "it is over", only=consumer
    )
    if at.happened and reported == [False]:
        assert list(consumer.seen.failed.values()) == [FailureReason.FENCE]
    else:
        assert consumer.seen.loaded
        consumer.check_bytes(stream.load, stream.prefill.seed)  # type: ignore[arg-type]
        if not at.happened:
            stream.prefill.end()
