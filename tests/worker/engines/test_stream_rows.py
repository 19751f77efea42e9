"""Prompts that are computed in several steps: what a producer's worker shows of them, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import (
    LeaseEnd,
    LeaseHold,
    LeaseOpen,
    LeaseProgress,
    StepOrders,
)
from kvferry.protocol.slots import (
    EMPTY,
    ID_BYTES,
    PAGE_IDS,
    ROW_HEADER_BYTES,
    SlotState,
    StreamRows,
    epoch_to_text,
    header_word,
    progress_of,
    slot_word,
)
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, TransferState
from tests.fakes.device_mark import ClockedDevice, FakeClock
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import Bytes
from tests.harness.engine import Engine
from tests.harness.exported import rows_of, slots_of
from tests.harness.integrity import check_worker, standing_still
from tests.harness.rig import Rig
from tests.waiting import wait_until

SLOT, ROW = 2, 5
FIRST, NEXT = Epoch(0xABC), Epoch(0xDEF)
STREAMING = replace(SETTINGS, row_blocks=(300,))


def streaming_producer(rig: Rig) -> tuple[Engine, FakeClock]:
    """An engine whose device has not finished anything yet."""
    clock = FakeClock()
    return rig.engine("P", settings=STREAMING, device=ClockedDevice(clock)), clock


def order(engine: Engine, **orders: Any) -> None:
    engine.order(StepOrders(boot=engine.boot, **orders))


def opened(epoch: Epoch, **row: Any) -> LeaseOpen:
    return LeaseOpen(slot=SLOT, epoch=epoch_to_text(epoch), **row)


def progress(epoch: Epoch, first: int, *ids: int, tokens: int) -> LeaseProgress:
    return LeaseProgress(
        slot=SLOT,
        epoch=epoch_to_text(epoch),
        row=ROW,
        origin=epoch_to_text(FIRST),
        tokens=tokens,
        first_blocks=(first,),
        blocks=(ids,),
    )


def hold(epoch: Epoch) -> LeaseHold:
    return LeaseHold(request_id="r", slot=SLOT, epoch=epoch_to_text(epoch))


def shown(engine: Engine, epoch: Epoch = FIRST) -> tuple[int, int]:
    """The slot's first word, and the tokens in its second."""
    table = slots_of(engine.worker)
    return int(table.words[SLOT]), progress_of(int(table.progress[SLOT]), epoch)


def row_of(engine: Engine) -> tuple[list[int], list[int]]:
    """The row's header and its first four ids."""
    rows = rows_of(engine.worker)
    return rows.headers[ROW].tolist(), rows.ids[ROW, :4].tolist()


COMPUTING, READY = (
    slot_word(FIRST, SlotState.COMPUTING),
    slot_word(FIRST, SlotState.READY),
)


def test_ids_come_with_the_orders_and_tokens_when_the_device_has_finished_the_step(
    rig: Rig,
) -> None:
    producer, clock = streaming_producer(rig)
    order(
        producer,
        opens=(opened(FIRST),),
        progress=(progress(FIRST, 0, 7, 8, tokens=32),),
    )
    check_worker(producer.worker)  # the thread has carried them out
    assert row_of(producer) == ([header_word(FIRST)] * 2, [7, 8, 0, 0])
    producer.worker.end_step()
    check_worker(producer.worker)
    assert shown(producer) == (COMPUTING, 0)
    clock.marks[-1].over = True
    wait_until(
        lambda: shown(producer) == (COMPUTING, 32),
        "the thread looks at the device by itself",
    )
    order(
        producer,
        progress=(progress(FIRST, 2, 9, tokens=40),),
        completions=(hold(FIRST),),
    )
    producer.worker.end_step()
    check_worker(producer.worker)
    assert shown(producer) == (COMPUTING, 32)
    clock.marks[-1].over = True
    wait_until(lambda: shown(producer) == (READY, 40), "the prompt is complete")
    assert row_of(producer)[1] == [7, 8, 9, 0]
    order(
        producer,
        ends=(LeaseEnd(request_id="r", slot=SLOT, epoch=epoch_to_text(FIRST)),),
    )
    wait_until(lambda: producer.worker.take_results().sent == {"r"}, "it is reported")
    assert (shown(producer), row_of(producer)[0]) == ((EMPTY, 0), [0, 0])


def test_a_lease_whose_last_part_does_not_fit_is_reported_although_the_same_step_holds_it(
    rig: Rig,
) -> None:
    """An order before it was lost. Without the report the engine would keep the blocks for ever."""
    producer, _ = streaming_producer(rig)
    order(producer, opens=(opened(FIRST),))
    order(producer, progress=(progress(FIRST, 3, 14, tokens=64),), holds=(hold(FIRST),))
    wait_until(lambda: "r" in producer.worker.take_results().sent, "it is reported")
    assert shown(producer)[0] == EMPTY


def test_a_step_that_was_never_launched_reports_no_tokens(rig: Rig) -> None:
    producer, clock = streaming_producer(rig)
    clock.reach()
    order(
        producer, opens=(opened(FIRST),), progress=(progress(FIRST, 0, 7, tokens=16),)
    )
    check_worker(producer.worker)
    assert shown(producer) == (COMPUTING, 0)
    producer.worker.end_step()
    wait_until(lambda: shown(producer) == (COMPUTING, 16), "it has ended")


def test_a_prompt_goes_on_under_another_epoch_before_its_orders_return(
    rig: Rig,
) -> None:
    """In that very step others may write its blocks."""
    producer, clock = streaming_producer(rig)
    clock.reach()
    order(
        producer,
        opens=(opened(FIRST),),
        progress=(progress(FIRST, 0, 7, 8, tokens=32),),
    )
    producer.worker.end_step()
    wait_until(lambda: shown(producer) == (COMPUTING, 32), "it is read")
    with standing_still(producer.worker):
        order(
            producer,
            opens=(opened(NEXT, row=ROW, origin=epoch_to_text(FIRST)),),
            progress=(progress(NEXT, 0, 4, tokens=16),),
        )
        assert (shown(producer), shown(producer, NEXT)) == (
            (slot_word(NEXT, SlotState.COMPUTING), 0),
        ) * 2
        assert row_of(producer) == (
            [header_word(FIRST), header_word(NEXT)],
            [7, 8, 0, 0],
        )
    producer.worker.end_step()
    wait_until(lambda: shown(producer, NEXT)[1] == 16, "it starts again")
    assert row_of(producer) == ([header_word(FIRST), header_word(NEXT)], [4, 8, 0, 0])


def test_peers_find_the_rows_by_the_description_and_can_read_them(any_rig: Rig) -> None:
    producer, _ = streaming_producer(any_rig)
    consumer = any_rig.engine("C")
    rows = producer.worker.description.stream_rows
    assert isinstance(rows, StreamRows)
    assert (rows.blocks, consumer.worker.description.stream_rows) == ((300,), None)
    order(
        producer,
        opens=(opened(FIRST),),
        progress=(progress(FIRST, 0, *range(40, 340), tokens=4800),),
    )
    check_worker(producer.worker)
    header = read(
        consumer, producer, rows.headers + ROW * ROW_HEADER_BYTES, ROW_HEADER_BYTES
    )
    assert header.view(np.uint64).tolist() == [header_word(FIRST)] * 2
    page = PAGE_IDS * ID_BYTES
    last = read(
        consumer, producer, rows.ids + (ROW * rows.pages + 1) * page, page
    ).view(np.uint32)
    assert last[: 300 - PAGE_IDS].tolist() == list(range(40 + PAGE_IDS, 340))


def read(consumer: Engine, producer: Engine, address: int, length: int) -> Bytes:
    """Bytes of the producer's, read over the fabric into the consumer's cache. The consumer has no thread yet."""
    fabric, memory, zero = (
        consumer.fabric,
        consumer.caches.memory[0],
        np.zeros(1, dtype=np.int32),
    )
    peer = fabric.add_peer(producer.worker.description.agent_metadata)
    rows = [
        DescriptorRows.from_tuples(MemoryKind.DRAM, [(at, length, 0, length, 1)])
        for at in (memory.ctypes.data, address)
    ]
    local, remote = fabric.prepare_local(rows[0]), fabric.prepare_remote(peer, rows[1])
    transfer = fabric.post_read(local, zero, remote, zero)
    wait_until(lambda: fabric.poll(transfer) is TransferState.DONE, "it has been read")
    for handle in (transfer, remote, local):
        fabric.release(handle)
    fabric.remove_peer(peer)
    return memory[:length].copy()
