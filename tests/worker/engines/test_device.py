"""Engines with a device: copies in host memory that it does not reach, pinned memory, threads and their streams."""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from bench.relayout_waves import moved_bytes

from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.params import Blocks
from kvferry.protocol.slots import (
    SlotState,
)
from kvferry.worker.device import HOST, DeviceMark
from kvferry.worker.relayout.device_table import DevicePieces, DeviceTable
from kvferry.worker.relayout.reference import ReferenceRelayout
from kvferry.worker.relayout.shape import CopyAxis, Shape
from kvferry.worker.relayout.wave_table import WaveTable
from kvferry.worker.staging import host_buffer as host_mirror
from tests.fakes.cuda import DEFAULT_STREAM, FakeCuda
from tests.fakes.cuda_memory import launch_relayout
from tests.fakes.memory_fabric import MemoryFabric
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape, ToyCaches
from tests.harness.engine import SHAPE
from tests.harness.integrity import ANSWER_WITHIN_S
from tests.harness.rig import Rig

ON_HOST = replace(SETTINGS, host_buffer=True)
SHAPES = {
    "alike": CacheShape(),
    "one allocation, two kernel blocks a scheduler block": CacheShape(
        one_storage=True, ratio=2
    ),
    "tokens outermost, with gaps": CacheShape(axes="tbh", gap_bytes=24),
    "a whole block a cell": CacheShape(tile_tokens=4, cell_bytes=64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sides", ["both", "producer", "consumer"])
def test_every_byte_arrives_through_host_memory(
    any_rig: Rig, shape: CacheShape, sides: str
) -> None:
    producer = any_rig.engine(
        "P", shape=shape, settings=ON_HOST if sides != "consumer" else SETTINGS
    )
    consumer = any_rig.engine(
        "C", shape=shape, settings=ON_HOST if sides != "producer" else SETTINGS
    )
    for tokens in (4, 8, 24):
        any_rig.transfer(producer, consumer, tokens=tokens, seed=tokens)
        totals = consumer.seen.totals[-1]
        assert totals.staged_bytes == (
            totals.planned_bytes if sides != "producer" else 0
        )


def test_peers_read_the_copy_and_never_the_caches(any_rig: Rig) -> None:
    producer, consumer = any_rig.pair(settings=ON_HOST)
    for part in producer.caches.memory:
        inside = range(part.ctypes.data, part.ctypes.data + part.nbytes)
        assert not any(
            tensor.base in inside for tensor in producer.worker.description.tensors
        )
    offer = producer.prefill(tokens=10, seed=3)
    any_rig.step_until(
        lambda: producer.word(offer) & 0xF == SlotState.READY,
        "the blocks have been copied",
    )
    producer.caches.fill(offer.blocks, 0x77)
    load = consumer.load(offer.params)
    assert any_rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)


def test_blocks_that_are_used_again_are_copied_again(any_rig: Rig) -> None:
    shape = CacheShape(blocks=8)
    producer, consumer = (
        any_rig.engine("P", shape=shape, settings=ON_HOST),
        any_rig.engine("C", settings=ON_HOST),
    )
    for seed in range(1, 6):
        any_rig.transfer(producer, consumer, tokens=26, seed=seed)


def test_a_request_that_is_larger_than_one_copy_is_ready_when_the_last_part_has_arrived(
    any_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_mirror, "WAVE_BYTES", 1)
    copies: list[WaveTable] = []
    try_start = ReferenceRelayout.try_start

    def noted(relayout: ReferenceRelayout, table: WaveTable) -> DeviceMark:
        copies.append(table)
        return try_start(relayout, table)

    producer = any_rig.engine("P", settings=ON_HOST)
    monkeypatch.setattr(ReferenceRelayout, "try_start", noted)
    offer = producer.prefill(tokens=26, seed=4)
    any_rig.step_until(
        lambda: producer.word(offer) & 0xF == SlotState.READY, "it is copied"
    )
    assert len(copies) == len(offer.blocks) > 1
    consumer = any_rig.engine("C", settings=ON_HOST)
    load = consumer.load(offer.params)
    assert any_rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=4)


class BusyRelayout:
    """A relayout that has room for every second wave only."""

    done = HOST.mark()

    def __init__(self) -> None:
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


def test_parts_that_find_no_room_are_copied_later_each_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relayout = BusyRelayout()
    monkeypatch.setattr(host_mirror, "relayout_for", lambda *_: relayout)
    caches = ToyCaches(SHAPE, 0)
    mirror = host_mirror.HostMirror(caches.kv, (SHAPE.group,))
    waves: deque[Blocks] = deque([((1,),), ((2,),), ((3,),)])
    assert [mirror.try_copy(waves) for _ in range(4)] == [
        None,
        None,
        None,
        relayout.done,
    ]
    assert relayout.copied == [1, 2, 3]


def test_one_copy_fits_into_the_kernels_table_however_narrow_its_accesses_are() -> None:
    pytest.importorskip("triton")
    from kvferry.worker.relayout.kernel import TILE
    from kvferry.worker.relayout.triton_relayout import TABLE_BYTES

    tensors, block_bytes = 1024, 4096
    count = host_mirror.WAVE_BYTES // (tensors * block_bytes)
    byte_by_byte = Shape.from_axes(
        [CopyAxis(block_bytes, 3, 3)], 1, source_unit_stride=(3 * block_bytes, 0)
    )
    table = WaveTable.from_rows(
        [byte_by_byte], [(0, 0, 0, 0, count, 0)] * tensors, [(0, 0, 0, 0)] * count
    )
    assert moved_bytes(table) == 2 * host_mirror.WAVE_BYTES
    assert (
        DeviceTable.compile(table, DevicePieces.compile(table.pieces), TILE).num_bytes
        <= TABLE_BYTES
    )


POOL_BYTES = 65 << 12
PINNED = replace(SETTINGS, host_buffer=True, staging_pool_bytes=POOL_BYTES)


def test_a_producer_pins_its_caches_copy_and_its_pool_in_whole_pages_and_no_more(
    cuda: FakeCuda, rig: Rig
) -> None:
    producer = rig.engine("P", device=cuda.device, settings=PINNED)
    mirrors = [
        -(-part.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for part in producer.caches.memory
    ]
    assert sorted(cuda.registered.values()) == sorted([*mirrors, POOL_BYTES])
    assert not any(address % mmap.PAGESIZE for address in cuda.registered)


def test_a_consumer_pins_its_pool_and_keeps_and_registers_no_copy_of_its_caches(
    cuda: FakeCuda, rig: Rig
) -> None:
    producer = rig.engine("P", device=cuda.device, settings=PINNED)
    before = set(cuda.registered)
    consumer = rig.engine(
        "C", device=cuda.device, settings=replace(PINNED, is_read_from=False)
    )
    assert [
        length for address, length in cuda.registered.items() if address not in before
    ] == [POOL_BYTES]
    fabric = consumer.fabric.inner
    assert isinstance(fabric, MemoryFabric)
    starts = {
        tensor.untyped_storage().data_ptr() for tensor in consumer.caches.kv.storages
    }
    assert not starts & {region.address for region in fabric.registered}
    rig.transfer(producer, consumer)
    cuda.check()


def test_memory_is_unpinned_once_and_after_the_transfer_thread_and_the_fabric_have_ended(
    cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair(device=cuda.device, settings=PINNED)
    rig.transfer(producer, consumer)
    close, pinned_at_close = producer.fabric.close, []

    def closed() -> None:
        pinned_at_close.append(len(cuda.registered))
        close()

    monkeypatch.setattr(producer.fabric, "close", closed)
    everything = len(cuda.registered)
    rig.retire(producer)
    producer.worker.close()
    assert set(pinned_at_close) == {everything, everything // 2}
    assert (
        cuda.names().count("cudaHostUnregister")
        == everything // 2
        == len(cuda.registered)
    )
    last = cuda.names().index("cudaHostUnregister")
    assert producer.worker.snapshot(ANSWER_WITHIN_S) is None, "its thread has ended"
    assert {call.name for call in cuda.calls[last:]} == {"cudaHostUnregister"}


def test_memory_that_cannot_be_pinned_stops_the_start_with_its_size(
    cuda: FakeCuda, rig: Rig
) -> None:
    cuda.host_error = 2
    with pytest.raises(
        InvalidConfig, match=r"room for \d+ bytes .* error 2"
    ) as refused:
        rig.engine("P", device=cuda.device, settings=PINNED)
    assert refused.value.field == "kv_buffer_device"


def test_a_start_that_cannot_pin_all_of_its_memory_unpins_the_rest(
    cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is pinned first, then the copy of the caches, part by part."""
    register = cuda.cudaHostRegister
    monkeypatch.setattr(
        cuda,
        "cudaHostRegister",
        lambda *of: 2 if len(cuda.registered) == 2 else register(*of),
    )
    with pytest.raises(InvalidConfig, match="error 2"):
        rig.engine("P", device=cuda.device, settings=PINNED)
    assert cuda.names().count("cudaHostUnregister") == 2
    assert not cuda.registered


@pytest.mark.parametrize("which", ["buffer", "host_buffer"])
def test_a_start_whose_kernels_cannot_be_made_unpins_all(
    cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(f"kvferry.worker.staging.{which}.relayout_for", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        rig.engine("P", device=cuda.device, settings=PINNED)
    assert "cudaHostRegister" in cuda.names()
    assert not cuda.registered


def test_a_load_is_zeroed_by_one_launch_on_a_stream_of_its_own_that_was_used_at_registration(
    cuda: FakeCuda, rig: Rig
) -> None:
    producer, consumer = rig.pair(device=cuda.device)
    warmed_up = {call.stream for call in cuda.calls if call.name == "launch"}
    begun = len(cuda.calls)
    rig.transfer(producer, consumer, tokens=10)
    launches = [call for call in cuda.calls[begun:] if call.name == "launch"]
    assert len(launches) == 1, f"{SHAPE.layers} layers with a gap each"
    assert launches[0].thread == "kvferry-transfer"
    assert launches[0].stream in warmed_up - {DEFAULT_STREAM}


def test_after_a_launch_that_raised_the_blocks_wait_for_the_stream_that_it_was_on(
    cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = rig.pair(device=cuda.device)
    rig.transfer(producer, consumer, tokens=10)
    begun = len(cuda.calls)

    def launch_and_raise(**what: Any) -> None:
        launch_relayout(**what)
        raise RuntimeError("of the test")

    with monkeypatch.context() as patched:
        patched.setattr(
            "kvferry.worker.relayout.triton_relayout.launch_relayout", launch_and_raise
        )
        load = consumer.load(producer.prefill(tokens=10).params)
        assert rig.until_over(consumer, load) is FailureReason.TRANSFER
    used = [call for call in cuda.calls[begun:] if call.thread == "kvferry-transfer"]
    launched = next(index for index, call in enumerate(used) if call.name == "launch")
    marked = next(call for call in used[launched:] if call.name == "record")
    assert marked.stream == used[launched].stream != DEFAULT_STREAM
    asked = [call.stream for call in used[launched:] if call.name == "query"]
    assert used[launched].stream in asked


def test_every_thread_that_uses_the_device_has_set_it(cuda: FakeCuda, rig: Rig) -> None:
    producer = rig.engine("P", device=cuda.device)
    consumer = rig.engine("C", device=cuda.device, shape=replace(SHAPE, axes="bth"))
    rig.transfer(producer, consumer, tokens=10)
    assert consumer.seen.totals[-1].staged_bytes, "the load went through the pool"
    threads = {call.thread for call in cuda.calls}
    assert len(threads) == 2, "the engine's thread, and the transfer thread"
    cuda.check()
