"""Single scenes of rows: where consumers find the ids, leases that share a row for a moment, orders that were lost."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import LeaseEnd, LeaseHold, LeaseOpen, LeaseProgress
from kvferry.protocol.slots import (
    EMPTY,
    ID_BYTES,
    PAGE_IDS,
    ROW_HEADER_BYTES,
    STREAM_ROWS,
    SlotState,
    epoch_to_text,
    header_word,
    progress_of,
    slot_word,
)
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.leases import LeaseTable, StreamRowTable
from tests.fakes.device_mark import FakeMark
from tests.harness.integrity import table_errors

FIRST, NEXT, OTHER = Epoch(5), Epoch(6), Epoch(7)


def opened(slot: int, epoch: Epoch, **row: Any) -> LeaseOpen:
    return LeaseOpen(slot=slot, epoch=epoch_to_text(epoch), **row)


def progress(
    slot: int, epoch: Epoch, first: int, *ids: int, tokens: int = 16, **changed: Any
) -> LeaseProgress:
    """Of one cache group."""
    usual = {
        "row": 3,
        "origin": epoch_to_text(epoch),
        "first_blocks": (first,),
        "blocks": (ids,),
    }
    return LeaseProgress(
        slot=slot, epoch=epoch_to_text(epoch), tokens=tokens, **{**usual, **changed}
    )


def hold(slot: int, epoch: Epoch) -> LeaseHold:
    return LeaseHold(request_id="r", slot=slot, epoch=epoch_to_text(epoch))


def table_of(*blocks: int) -> tuple[LeaseTable, StreamRowTable]:
    rows = StreamRowTable(blocks)
    return LeaseTable(4, rows=rows), rows


@pytest.mark.parametrize("blocks", [(1,), (PAGE_IDS,), (PAGE_IDS + 1, 3), (5, 600, 1)])
def test_a_consumer_finds_header_and_ids_of_every_group_by_the_address(
    blocks: tuple[int, ...],
) -> None:
    table, rows = table_of(*blocks)
    address, ids = (
        rows.address,
        tuple(tuple(range(9 + group, 9 + group + n)) for group, n in enumerate(blocks)),
    )
    assert address is not None
    for row in (0, 1, STREAM_ROWS - 1):
        epoch = Epoch(row + 1)
        table.open(opened(0, epoch))
        assert table.publish(
            progress(0, epoch, 0, row=row, first_blocks=(0,) * len(blocks), blocks=ids)
        )
        found = ctypes.string_at(
            address.headers + row * ROW_HEADER_BYTES, ROW_HEADER_BYTES
        )
        assert np.frombuffer(found, np.uint64).tolist() == [header_word(epoch)] * 2
        for group, expected in enumerate(ids):
            at = (
                address.ids
                + ((row * address.pages * PAGE_IDS) + sum(blocks[:group])) * ID_BYTES
            )
            assert np.frombuffer(
                ctypes.string_at(at, len(expected) * ID_BYTES), np.uint32
            ).tolist() == [*expected]
    registered = [(region.address, region.length) for region in rows.regions()]
    sizes = (
        STREAM_ROWS * ROW_HEADER_BYTES,
        STREAM_ROWS * address.pages * PAGE_IDS * ID_BYTES,
    )
    assert registered == [(address.headers, sizes[0]), (address.ids, sizes[1])]


def test_an_engine_that_does_not_stream_has_no_rows_and_refuses_orders_for_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internal_errors, "_quiet_until_s", 0.0)
    table, rows = table_of()
    assert (rows.address, rows.regions()) == (None, [])
    table.open(opened(0, FIRST))
    assert not table.publish(progress(0, FIRST, 0, 7))
    assert "internal error" in caplog.text


def test_tokens_are_reported_step_by_step_while_several_are_in_flight() -> None:
    table, _ = table_of(9)
    table.open(opened(0, FIRST))
    marks = [FakeMark(), FakeMark(), FakeMark()]
    for number, mark in enumerate(marks):
        order = progress(0, FIRST, number, 50 + number, tokens=16 * number + 16)
        assert table.publish(order)
        table.complete(order, mark)
    seen = []
    for mark in marks:
        assert not table.advance()
        mark.over = True
        assert len(table.pending) == 1
        assert table.advance()
        seen.append(progress_of(int(table.progress[0]), FIRST))
    assert seen == [16, 32, 48]
    assert not table.pending


def test_the_end_of_a_lease_does_not_touch_a_row_that_another_one_has_taken() -> None:
    """An order to go on is carried out at once; the end of the row's former lease may still wait for its turn."""
    table, rows = table_of(9)
    table.open(opened(0, OTHER))
    assert table.publish(progress(0, OTHER, 0, 7))
    table.open(opened(1, FIRST))
    table.open(opened(1, NEXT, row=3, origin=epoch_to_text(FIRST)))
    assert table_errors(table.snapshot()) == []
    table.end(LeaseEnd(request_id="r", slot=0, epoch=epoch_to_text(OTHER)))
    assert rows.headers[3].tolist() == [header_word(FIRST), header_word(NEXT)]
    assert table_errors(table.snapshot()) == []


def test_a_lease_of_which_orders_were_lost_cannot_be_read_until_it_goes_on_under_another_epoch() -> (
    None
):
    table, rows = table_of(9)
    table.open(opened(0, FIRST))
    mark = FakeMark()
    for number, reached in enumerate([FakeMark(over=True), mark]):
        order = progress(0, FIRST, number, 7, tokens=16 * number + 16)
        assert table.publish(order)
        table.complete(order, reached)
    assert table.advance()
    assert progress_of(int(table.progress[0]), FIRST) == 16
    assert not table.publish(progress(0, FIRST, 3, 9, tokens=64)), (
        "the ids of the third block are missing"
    )
    assert (int(table.words[0]), int(table.progress[0])) == (EMPTY, EMPTY)
    assert not table.pending
    assert table.hold(hold(0, FIRST), None) == "r", "it is reported all the same"
    table.complete(hold(0, FIRST), mark)
    mark.over = True
    assert not table.advance()
    assert (int(table.words[0]), int(table.progress[0])) == (EMPTY, EMPTY)
    assert table_errors(table.snapshot()) == []
    assert (
        table.end(LeaseEnd(request_id="r", slot=0, epoch=epoch_to_text(FIRST))) is None
    )
    assert not rows.headers.any()


def test_what_was_published_under_a_former_epoch_does_not_count() -> None:
    table, rows = table_of(9)
    table.open(opened(0, FIRST))
    order, mark = progress(0, FIRST, 0, 7, 8, tokens=32), FakeMark()
    assert table.publish(order)
    table.open(opened(0, NEXT, row=3, origin=epoch_to_text(FIRST)))
    table.complete(order, mark)
    assert not table.publish(progress(0, FIRST, 2, 9))
    mark.over = True
    assert not table.advance()
    assert (int(table.words[0]), int(table.progress[0])) == (
        slot_word(NEXT, SlotState.COMPUTING),
        EMPTY,
    )
    assert rows.headers[3].tolist() == [header_word(FIRST), header_word(NEXT)]
    assert table.publish(progress(0, NEXT, 0, 4, origin=epoch_to_text(FIRST)))
    assert rows.ids[3, :2].tolist() == [4, 8]


def test_a_step_that_ends_while_its_lease_goes_on_under_another_epoch_reports_nothing() -> (
    None
):
    table, _ = table_of(9)

    class Late(FakeMark):
        def reached(self) -> bool:
            table.open(opened(0, NEXT, row=3, origin=epoch_to_text(FIRST)))
            return True

    table.open(opened(0, FIRST))
    order = progress(0, FIRST, 0, 7)
    assert table.publish(order)
    table.complete(order, Late())
    assert table.advance()
    assert (int(table.words[0]), int(table.progress[0])) == (
        slot_word(NEXT, SlotState.COMPUTING),
        EMPTY,
    )


def test_a_row_that_belongs_to_no_lease_is_an_error() -> None:
    table, rows = table_of(9)
    rows.headers[2] = 81, 81
    assert table_errors(table.snapshot()) == [
        "row 2 has the header 0x51, 0x51 of no lease"
    ]


def test_clear_ends_every_row() -> None:
    table, rows = table_of(9)
    table.open(opened(0, FIRST))
    order = progress(0, FIRST, 0, 7)
    table.publish(order)
    table.complete(order, FakeMark(over=True))
    table.advance()
    table.clear()
    assert not table.words.any()
    assert not table.progress.any()
    assert not rows.headers.any()
