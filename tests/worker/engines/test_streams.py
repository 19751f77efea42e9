"""Prompts that are read while they are computed: whatever happens meanwhile, the bytes are right or the load fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvferry.protocol.ids import EMPTY, Epoch, SlotState, epoch_from_text, new_epoch, progress_word, slot_word
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.stream_rows import header_word
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.results import LoadRecord
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.integrity import check_worker
from tests.harness.prefills import Prefill
from tests.harness.rig import Rig, rig_of
from tests.waiting import wait_until
from tests.worker.engines.test_staging import PAIRS, STAGED

STREAMS = replace(SETTINGS, row_blocks=(40,))
GARBAGE = 0x66


@dataclass
class Stream:
    """One prompt on its way."""

    rig: Rig
    producer: Engine
    consumer: Engine
    prefill: Prefill
    load: OrderedLoad | None = None

    @classmethod
    def begin(cls, rig: Rig, producer: Engine, consumer: Engine, tokens: int, first: int, seed: int = 7) -> Stream:
        """A part is computed before the consumer asks."""
        stream = cls(rig, producer, consumer, producer.begin_prefill(tokens, seed))
        producer.step()
        stream.compute(first)
        stream.prefill.offer()
        return stream

    def order(self, local_tokens: int = 0) -> OrderedLoad:
        assert self.prefill.params is not None
        self.load = self.consumer.load(self.prefill.params, local_tokens=local_tokens)
        return self.load

    def compute(self, tokens: int) -> None:
        self.producer.compute(self.prefill, tokens)
        self.producer.step()

    def compute_rest(self, chunk: int) -> None:
        """The rest of the prompt, chunk by chunk; the consumer reads each before the next one is computed."""
        while not self.prefill.is_complete:
            left = self.prefill.tokens - self.prefill.done
            self.compute(min(chunk, left))
            if left > chunk:
                self.until_read(self.prefill.done)
        self.prefill.end()

    def until_read(self, tokens: int) -> None:
        """Wait until the consumer has read the whole blocks of these tokens, or has ended."""
        whole = tokens // self.producer.shape.group.block_tokens * self.producer.shape.group.block_tokens

        def is_read() -> bool:
            assert self.load is not None
            records = [load.record for load in self.running() if load.order.request_id == self.load.request_id]
            results = self.consumer.worker._thread.results._results
            is_over = self.load.request_id in results.loaded | results.failed.keys()
            return is_over or any(chunk[0] >= whole for record in records for chunk in record.chunks[-1:])

        if whole:
            wait_until(is_read, f"{whole} tokens are read")

    def running(self) -> list[Load]:
        return list(self.consumer.worker._thread.runner.alive())

    def is_over(self, polls: int) -> bool:
        """Whether the load has ended, or the consumer has polled more reads than these."""
        assert self.load is not None
        return self.consumer.seen.is_over(self.load.request_id) or self.consumer.fabric.calls["poll"] > polls

    def over(self) -> FailureReason | None:
        assert self.load is not None
        return self.rig.until_over(self.consumer, self.load)

    def record(self) -> LoadRecord:
        return self.consumer.seen.load_records[-1]

    def check(self) -> None:
        """The load is good, and every byte of the cache is as it must be."""
        assert self.load is not None
        assert self.over() is None
        self.consumer.check_bytes(self.load, self.prefill.seed)

    def preempt(self) -> None:
        """Its blocks are another prompt's at once."""
        freed = self.prefill.preempt()
        self.producer.step()
        self.producer.caches.fill(freed, GARBAGE)
        self.producer.give_back(freed)

    def abort(self) -> None:
        """Its lease ends, and then its blocks are another prompt's."""
        assert self.prefill.params is not None
        blocks, slot = self.prefill.blocks, self.prefill.params.kvferry.lease_slot
        freed = self.prefill.abort()
        self.producer.step()
        wait_until(lambda: self.producer.worker._memory.table.words[slot] == EMPTY, "the lease has ended")
        self.producer.caches.fill(blocks, GARBAGE)
        self.producer.give_back(freed)


def pair(rig: Rig, **settings: Any) -> tuple[Engine, Engine]:
    return rig.pair(**{"settings": STREAMS, **settings})


def test_a_prompt_is_read_part_by_part_while_it_is_computed(any_rig: Rig) -> None:
    producer, consumer = pair(any_rig)
    stream = Stream.begin(any_rig, producer, consumer, tokens=30, first=5)
    stream.order()
    stream.compute_rest(8)
    stream.check()
    record = stream.record()
    assert [stop for stop, _, _ in record.chunks] == [12, 20, 28, 30]
    assert all(begun_s <= ended_s for _, begun_s, ended_s in record.chunks)
    assert record.planned_bytes == 8 * consumer.shape.block_bytes
    assert record.early_bytes == 7 * consumer.shape.block_bytes
    assert record.restarts == 0
    any_rig.step_until(lambda: stream.prefill.request_id in producer.seen.sent, "the producer is told")


def test_a_streamed_load_that_waits_for_more_holds_no_place_and_no_memory(rig: Rig) -> None:
    producer, consumer = pair(rig, settings=replace(STREAMS, max_loads=1))
    other = rig.engine("Q")
    stream = Stream.begin(rig, producer, consumer, tokens=30, first=5)
    stream.order()
    stream.compute(8)
    stream.until_read(13)
    wait_until(consumer.worker._thread.runner.parked, "it waits")
    ready = consumer.load(other.prefill(tokens=9, seed=3).params)
    rig.step_until(lambda: consumer.seen.is_over(ready.request_id), "the other one is loaded", only=consumer)
    stream.compute_rest(8)
    assert stream.over() is None


SHAPES = {
    "alike": (CacheShape(), CacheShape(), STREAMS),
    "blocks of 4 and 8": (CacheShape(), CacheShape(block_tokens=8, blocks=24), STREAMS),
    "blocks of 8 and 4": (CacheShape(block_tokens=8, blocks=24), CacheShape(), STREAMS),
    "two kernel blocks a scheduler block": (CacheShape(ratio=2), CacheShape(), STREAMS),
    **{f"staged, {name}": (*shapes, replace(STAGED, row_blocks=(40,))) for name, shapes in PAIRS.items()},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("here", "there", "settings"), SHAPES.values(), ids=SHAPES)
def test_any_parts_of_any_geometry_are_the_same_bytes_as_the_whole(
    rig: Rig, here: CacheShape, there: CacheShape, settings: Any, seed: int
) -> None:
    draw = random.Random(seed)
    producer, consumer = rig.engine("P", shape=here, settings=settings), rig.engine("C", shape=there, settings=settings)
    for _ in range(3):
        tokens = draw.randint(9, 60)
        stream = Stream.begin(rig, producer, consumer, tokens, first=draw.randint(1, 8), seed=draw.randint(1, 99))
        local = draw.choice([0, 0, there.group.block_tokens])
        stream.order(local_tokens=min(local, tokens - 1) // there.group.block_tokens * there.group.block_tokens)
        while not stream.prefill.is_complete:
            stream.compute(min(draw.randint(1, 13), tokens - stream.prefill.done))
            if draw.random() < 0.7 and not stream.prefill.is_complete:
                consumer.step()
        stream.prefill.end()
        stream.check()
        assert stream.load is not None
        consumer.free(stream.load)
        rig.step_until(lambda s=stream: s.prefill.request_id in producer.seen.sent, "its blocks are free")  # type: ignore[misc]


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
def test_a_prompt_that_is_preempted_at_any_moment_is_read_anew_and_right(kind: str, point: int) -> None:
    with rig_of(kind) as rig:
        producer, consumer = pair(rig)
        rig.transfer(producer, consumer)
        stream = Stream.begin(rig, producer, consumer, tokens=22, first=3)
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
    stream = Stream.begin(rig, producer, consumer, tokens=22, first=3)
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
    stream = Stream.begin(rig, producer, consumer, tokens=22, first=3)
    stream.compute(7)
    at = AtPost(consumer, point, stream.abort)
    stream.order()
    wait_until(lambda: at.happened, "it is aborted")
    rig.step_until(lambda: consumer.seen.failed, "the load fails", only=consumer)
    assert set(consumer.seen.failed.values()) == {FailureReason.FENCE}
    assert len(consumer.seen.loaded) == 1, "only the one before"


@pytest.mark.parametrize("point", range(12))
def test_a_lease_that_ends_after_the_prompt_is_complete_fails_the_load_or_comes_too_late(rig: Rig, point: int) -> None:
    producer, consumer = pair(rig)
    stream = Stream.begin(rig, producer, consumer, tokens=22, first=3)
    stream.compute(7)
    stream.order()
    stream.until_read(10)
    thread = consumer.worker._thread
    reported = []

    def abort() -> None:
        reported.append(bool(thread.results._results.loaded or consumer.seen.loaded))
        stream.abort()

    producer.compute(stream.prefill, 12)
    producer.step()
    at = AtPost(consumer, point, abort)
    rig.step_until(lambda: consumer.seen.loaded or consumer.seen.failed, "it is over", only=consumer)
    if at.happened and reported == [False]:
        assert list(consumer.seen.failed.values()) == [FailureReason.FENCE]
    else:
        assert consumer.seen.loaded
        consumer.check_bytes(stream.load, stream.prefill.seed)  # type: ignore[arg-type]
        if not at.happened:
            stream.prefill.end()


def waiting(rig: Rig) -> tuple[Stream, Any]:
    """A stream of which a part has been read, and its row on the producer."""
    producer, consumer = pair(rig)
    stream = Stream.begin(rig, producer, consumer, tokens=30, first=5)
    stream.compute(4)
    stream.order()
    stream.until_read(9)
    wait_until(consumer.worker._thread.runner.parked, "it waits")
    return stream, producer.worker._memory.rows


@pytest.mark.parametrize("block", [0, 47, 48, 2**31, 2**32 - 1])
def test_ids_outside_the_cache_fail_the_load(rig: Rig, block: int) -> None:
    stream, rows = waiting(rig)
    stream.prefill.compute(8, stream.producer._take_blocks(8))
    row = stream.prefill.params.kvferry.stream_row  # type: ignore[union-attr]
    stream.producer.launched.append(lambda: wait_until(lambda: rows.ids[row, 3], "it is listed"))
    stream.producer.launched.append(lambda: rows.ids.__setitem__((row, 3), block))
    stream.producer.step()
    if block == 47:  # some block of the cache: the bytes are wrong, and the producer's own fault
        stream.compute_rest(8)
        assert stream.over() is None
    else:
        assert stream.over() is FailureReason.PARAMS


def test_a_row_that_is_another_leases_ends_the_load(rig: Rig) -> None:
    stream, rows = waiting(rig)
    table, slot = stream.producer.worker._memory.table, stream.prefill.params.kvferry.lease_slot  # type: ignore[union-attr]
    row = stream.prefill.params.kvferry.stream_row  # type: ignore[union-attr]
    header, word, other = rows.headers[row].copy(), int(table.words[slot]), new_epoch()
    rows.headers[row] = header_word(other)
    table.words[slot] = slot_word(other, SlotState.READY)
    assert stream.over() is FailureReason.FENCE
    rows.headers[row], table.words[slot] = header, word
    stream.abort()


def test_an_epoch_that_no_header_names_is_waited_for_until_the_deadline(rig: Rig) -> None:
    """So it is between the words of a producer's workers."""
    stream, _ = waiting(rig)
    table, slot = stream.producer.worker._memory.table, stream.prefill.params.kvferry.lease_slot  # type: ignore[union-attr]
    word = int(table.words[slot])
    table.words[slot] = slot_word(new_epoch(), SlotState.READY)
    stream.consumer.set_timeouts(load_s=0.3)
    assert stream.over() is FailureReason.DEADLINE
    table.words[slot] = word
    stream.abort()


def test_a_prompt_that_the_row_has_no_room_for_and_a_producer_without_rows_are_refused(rig: Rig) -> None:
    producer, consumer = pair(rig, settings=replace(STREAMS, row_blocks=(7,)))
    stream = Stream.begin(rig, producer, consumer, tokens=30, first=5)
    stream.order()
    assert stream.over() is FailureReason.PARAMS
    stream.abort()
    plain = rig.engine("Q")
    load = consumer.load(plain.changed(plain.prefill(tokens=10), ticket={"stream_row": 3}, remote_block_ids=((),)))
    assert rig.until_over(consumer, load) is FailureReason.PARAMS


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_producer_writes_the_load_ends_and_nothing_breaks(
    rig: Rig, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    draw = random.Random(seed)
    stream, rows = waiting(rig)
    memory, params = stream.producer.worker._memory, stream.prefill.params
    assert params is not None
    slot, row, epoch = params.kvferry.lease_slot, params.kvferry.stream_row, epoch_from_text(params.kvferry.lease_epoch)
    words = [0, 2**64 - 1, draw.getrandbits(64), *(slot_word(epoch, state) for state in SlotState)]
    words += [slot_word(Epoch(9), state) for state in SlotState]
    headers = [0, 1, header_word(epoch), header_word(Epoch(9)), 2**64 - 1, draw.getrandbits(64)]
    before = memory.table.words.copy(), memory.table.progress.copy(), rows.headers.copy()
    stream.consumer.set_timeouts(load_s=0.3)
    for _ in range(draw.randint(1, 40)):
        rows.ids[row] = draw.choices([draw.randrange(48), draw.getrandbits(32)], [8, 1])[0]
        rows.headers[row] = draw.choice([header_word(epoch), draw.choice(headers)]), draw.choice(headers)
        memory.table.progress[slot] = progress_word(draw.choice([epoch, Epoch(9)]), draw.randrange(60))
        memory.table.words[slot] = draw.choice(words)
        stream.consumer.step()
        wait_until(lambda n=stream.consumer.fabric.calls["poll"]: stream.is_over(n), "it looks")  # type: ignore[misc]
    stream.over()
    memory.table.words[:], memory.table.progress[:], rows.headers[:] = before
    stream.abort()
    assert "internal error" not in caplog.text
    rig.step_until(lambda: not stream.consumer.seen.alive, "nothing is left")
    check_worker(stream.consumer.worker)
