"""What a producer's slots and rows may say while a prompt is read: anything, and the load ends."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import (
    SlotState,
    epoch_from_text,
    header_word,
    new_epoch,
    progress_word,
    slot_word,
)
from kvferry.worker.fabric.reads import (
    EntryRead,
    LeaseReads,
    RemoteEntries,
    SlotWords,
)
from kvferry.worker.loads import state as load_state
from tests.harness.exported import rows_of, slots_of
from tests.harness.integrity import check_worker
from tests.harness.rig import Rig
from tests.waiting import wait_until
from tests.worker.engines.streams import STREAMS, ServedStream, pair

pytestmark = pytest.mark.parametrize("shared", [False, True], ids=["read", "mapped"])
"""Whether the consumer reads slots and rows over the fabric, or loads them from mapped memory."""


def waiting(rig: Rig, shared: bool) -> tuple[ServedStream, Any]:
    """A stream of which a part has been read, and its row on the producer."""
    producer, consumer = pair(rig, shared=shared)
    stream = ServedStream.begin(rig, producer, consumer, tokens=30, first=5)
    stream.compute(4)
    stream.order()
    stream.until_read(9)
    wait_until(consumer.parked_loads, "it waits")
    return stream, rows_of(producer.worker)


@pytest.mark.parametrize("block", [0, 47, 48, 2**31, 2**32 - 1])
def test_ids_outside_the_cache_fail_the_load(
    rig: Rig, shared: bool, block: int
) -> None:
    stream, rows = waiting(rig, shared)
    stream.prefill.compute(8, stream.producer.take_blocks(8))
    row = stream.prefill.params.kvferry.stream_row  # type: ignore[union-attr]
    stream.producer.launched.append(
        lambda: wait_until(lambda: rows.ids[row, 3], "it is listed")
    )
    stream.producer.launched.append(lambda: rows.ids.__setitem__((row, 3), block))
    stream.producer.step()
    if (
        block == 47
    ):  # some block of the cache: the bytes are wrong, and the producer's own fault
        stream.compute_rest(8)
        assert stream.over() is None
    else:
        assert stream.over() is FailureReason.PARAMS


def test_a_row_that_is_another_leases_ends_the_load(rig: Rig, shared: bool) -> None:
    stream, rows = waiting(rig, shared)
    table = slots_of(stream.producer.worker)
    slot = stream.prefill.params.kvferry.lease_slot  # type: ignore[union-attr]
    row = stream.prefill.params.kvferry.stream_row  # type: ignore[union-attr]
    header, word, other = rows.headers[row].copy(), int(table.words[slot]), new_epoch()
    rows.headers[row] = header_word(other)
    table.words[slot] = slot_word(other, SlotState.READY)
    assert stream.over() is FailureReason.FENCE
    rows.headers[row], table.words[slot] = header, word
    stream.abort()


def test_a_header_that_names_no_epoch_fails_the_load(rig: Rig, shared: bool) -> None:
    stream, rows = waiting(rig, shared)
    assert stream.prefill.params is not None
    slot = stream.prefill.params.kvferry.lease_slot
    row = stream.prefill.params.kvferry.stream_row
    slots = slots_of(stream.producer.worker)
    header, word = rows.headers[row].copy(), int(slots.words[slot])
    rows.headers[row, 1] = 2**64 - 1
    slots.words[slot] = slot_word(new_epoch(), SlotState.READY)
    assert stream.over() is FailureReason.FENCE
    rows.headers[row], slots.words[slot] = header, word
    stream.abort()


def test_a_producer_that_names_new_epochs_for_ever_does_not_keep_the_transfer_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Reads of the fake fabric have ended when they are posted, as those within one host may."""
    monkeypatch.setattr(load_state, "LONGEST", 3)
    stream, rows = waiting(rig, shared)
    assert stream.prefill.params is not None
    slot = stream.prefill.params.kvferry.lease_slot
    row = stream.prefill.params.kvferry.stream_row
    slots = slots_of(stream.producer.worker)
    header, word = rows.headers[row].copy(), int(slots.words[slot])
    read_words = LeaseReads.words

    def named_anew(
        reads: LeaseReads, sources: Sequence[RemoteEntries], index: int
    ) -> Generator[None, None, SlotWords]:
        rows.headers[row, 1] = header_word(new_epoch())
        return (yield from read_words(reads, sources, index))

    monkeypatch.setattr(LeaseReads, "words", named_anew)
    stream.consumer.set_timeouts(load_s=0.3)
    slots.words[slot] = slot_word(new_epoch(), SlotState.READY)
    assert stream.over() is FailureReason.DEADLINE
    rows.headers[row], slots.words[slot] = header, word
    stream.abort()


def test_an_epoch_that_no_header_names_is_waited_for_until_the_deadline(
    rig: Rig, shared: bool
) -> None:
    """So it is between the words of a producer's workers."""
    stream, _ = waiting(rig, shared)
    table = slots_of(stream.producer.worker)
    slot = stream.prefill.params.kvferry.lease_slot  # type: ignore[union-attr]
    word = int(table.words[slot])
    table.words[slot] = slot_word(new_epoch(), SlotState.READY)
    stream.consumer.set_timeouts(load_s=0.3)
    assert stream.over() is FailureReason.DEADLINE
    table.words[slot] = word
    stream.abort()


def test_a_prompt_that_the_row_has_no_room_for_and_a_producer_without_rows_are_refused(
    rig: Rig, shared: bool
) -> None:
    producer, consumer = pair(
        rig, settings=replace(STREAMS, row_blocks=(7,)), shared=shared
    )
    stream = ServedStream.begin(rig, producer, consumer, tokens=30, first=5)
    stream.order()
    assert stream.over() is FailureReason.PARAMS
    stream.abort()
    plain = rig.engine("Q", shared=shared)
    load = consumer.load(
        plain.changed(
            plain.prefill(tokens=10), ticket={"stream_row": 3}, remote_block_ids=((),)
        )
    )
    assert rig.until_over(consumer, load) is FailureReason.PARAMS


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_producer_writes_the_load_ends_and_nothing_breaks(
    rig: Rig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
    seed: int,
) -> None:
    draw = random.Random(seed)
    stream, rows = waiting(rig, shared)
    slots = slots_of(stream.producer.worker)
    params = stream.prefill.params
    assert params is not None
    slot, row, epoch = (
        params.kvferry.lease_slot,
        params.kvferry.stream_row,
        epoch_from_text(params.kvferry.lease_epoch),
    )
    words = [
        0,
        2**64 - 1,
        draw.getrandbits(64),
        *(slot_word(epoch, state) for state in SlotState),
    ]
    words += [slot_word(Epoch(9), state) for state in SlotState]
    headers = [
        0,
        1,
        header_word(epoch),
        header_word(Epoch(9)),
        2**64 - 1,
        draw.getrandbits(64),
    ]
    before = slots.words.copy(), slots.progress.copy(), rows.headers.copy()
    stream.consumer.set_timeouts(load_s=0.3)
    values = EntryRead.values
    looks: list[EntryRead] = []

    def noted(read: EntryRead) -> Any:
        looks.append(read)
        return values(read)

    monkeypatch.setattr(EntryRead, "values", noted)
    for _ in range(draw.randint(1, 40)):
        rows.ids[row] = draw.choices(
            [draw.randrange(48), draw.getrandbits(32)], [8, 1]
        )[0]
        rows.headers[row] = (
            draw.choice([header_word(epoch), draw.choice(headers)]),
            draw.choice(headers),
        )
        slots.progress[slot] = progress_word(
            draw.choice([epoch, Epoch(9)]), draw.randrange(60)
        )
        slots.words[slot] = draw.choice(words)
        stream.consumer.step()
        before_look = len(looks)
        wait_until(lambda n=before_look: len(looks) > n or stream.is_over(), "it looks")  # type: ignore[misc]
    stream.over()
    slots.words[:], slots.progress[:], rows.headers[:] = before
    stream.abort()
    assert "internal error" not in caplog.text
    rig.step_until(lambda: not stream.consumer.seen.alive, "nothing is left")
    check_worker(stream.consumer.worker)
