"""Engines whose fabric does not reach their device: everything goes through host memory, and nothing else is read."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch
from bench.relayout_waves import moved_bytes

from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.ids import SlotState
from kvferry.protocol.params import Blocks
from kvferry.worker.caches import DeviceClock, DeviceMark
from kvferry.worker.relayout.device_table import DevicePieces, DeviceTable
from kvferry.worker.relayout.shape import Axis, Shape
from kvferry.worker.relayout.wave_table import WaveTable
from kvferry.worker.staging import host_buffer as host_mirror
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.rig import Rig

ON_HOST = replace(SETTINGS, host_buffer=True)
SHAPES = {
    "alike": CacheShape(),
    "one allocation, two kernel blocks a scheduler block": CacheShape(one_storage=True, ratio=2),
    "tokens outermost, with gaps": CacheShape(axes="tbh", gap_bytes=24),
    "a whole block a cell": CacheShape(tile_tokens=4, cell_bytes=64),
}


def is_inside_the_caches(engine: Engine, address: int) -> bool:
    return any(part.ctypes.data <= address < part.ctypes.data + part.nbytes for part in engine.caches.memory)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sides", ["both", "producer", "consumer"])
def test_every_byte_arrives_through_host_memory(any_rig: Rig, shape: CacheShape, sides: str) -> None:
    producer = any_rig.engine("P", shape=shape, settings=ON_HOST if sides != "consumer" else SETTINGS)
    consumer = any_rig.engine("C", shape=shape, settings=ON_HOST if sides != "producer" else SETTINGS)
    for tokens in (4, 8, 24):
        any_rig.transfer(producer, consumer, tokens=tokens, seed=tokens)
        totals = consumer.seen.totals[-1]
        assert totals.staged_bytes == (totals.planned_bytes if sides != "producer" else 0)


def test_peers_read_the_copy_and_never_the_caches(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair(settings=ON_HOST)
    assert not any(is_inside_the_caches(producer, tensor.base) for tensor in producer.worker.description.tensors)
    offer = producer.prefill(tokens=10, seed=3)
    any_rig.step_until(lambda: producer.word(offer) & 0xF == SlotState.READY, "the blocks have been copied")
    producer.caches.fill(offer.blocks, 0x77)
    load = consumer.load(offer.params)
    assert any_rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)


def test_blocks_that_are_used_again_are_copied_again(any_rig: Rig) -> None:
    shape = CacheShape(blocks=8)
    producer, consumer = any_rig.engine("P", shape=shape, settings=ON_HOST), any_rig.engine("C", settings=ON_HOST)
    for seed in range(1, 6):
        any_rig.transfer(producer, consumer, tokens=26, seed=seed)


def test_what_does_not_change_from_copy_to_copy_is_made_once(rig: Rig) -> None:
    producer = rig.engine("P", settings=ON_HOST)
    mirror = producer.worker._memory.mirror
    assert mirror is not None
    first, second = (mirror._table(blocks) for blocks in (((1, 2),), ((3,),)))
    assert first.pieces is second.pieces
    assert (first.units[:, 0].tolist(), second.units[:, 0].tolist()) == ([1, 2], [3])


def test_a_host_buffer_without_a_pool_is_refused_by_name(rig: Rig) -> None:
    with pytest.raises(InvalidConfig) as refused:
        rig.engine("P", settings=replace(ON_HOST, staging_pool_bytes=0))
    assert refused.value.field == "staging_pool_bytes"


def test_a_request_that_is_larger_than_one_copy_is_ready_when_the_last_part_has_arrived(
    any_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mirror, "WAVE_BYTES", 1)
    producer, consumer = any_rig.pair(settings=ON_HOST)
    any_rig.transfer(producer, consumer, tokens=26, seed=4)
    mirror = producer.worker._memory.mirror
    assert mirror is not None
    assert mirror._relayout.launches == len(producer.offers.popitem()[1].blocks) > 1


class BusyRelayout:
    """A relayout that has room for every second wave only."""

    done = DeviceClock(torch.device("cpu")).mark()

    def __init__(self) -> None:
        self.launches = 0
        self.asked = 0
        self.copied: list[int] = []

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        self.asked += 1
        if self.asked % 2:
            return None
        self.copied += sorted(set(table.units[:, 0].tolist()))
        return self.done

    def mark(self) -> DeviceMark:
        return self.done


def test_parts_that_find_no_room_are_copied_later_each_once_and_in_order(any_rig: Rig) -> None:
    producer = any_rig.engine("P", settings=ON_HOST)
    mirror = producer.worker._memory.mirror
    assert mirror is not None
    relayout = BusyRelayout()
    mirror._relayout = relayout
    waves: deque[Blocks] = deque([((1,),), ((2,),), ((3,),)])
    assert [mirror.try_copy(waves) for _ in range(4)] == [None, None, None, relayout.done]
    assert relayout.copied == [1, 2, 3]


def test_one_copy_fits_into_the_kernels_table_however_narrow_its_accesses_are() -> None:
    pytest.importorskip("triton")
    from kvferry.worker.relayout.kernel import TILE
    from kvferry.worker.relayout.triton_relayout import TABLE_BYTES

    tensors, block_bytes = 1024, 4096
    count = host_mirror.WAVE_BYTES // (tensors * block_bytes)
    byte_by_byte = Shape.of([Axis(block_bytes, 3, 3)], 1, source_unit_stride=(3 * block_bytes, 0))
    table = WaveTable.of([byte_by_byte], [(0, 0, 0, 0, count, 0)] * tensors, [(0, 0, 0, 0)] * count)
    assert moved_bytes(table) == 2 * host_mirror.WAVE_BYTES
    assert DeviceTable.of(table, DevicePieces.of(table.pieces), TILE).num_bytes <= TABLE_BYTES
