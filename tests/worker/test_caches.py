"""What is registered of a worker's caches, and which bytes the eraser of tails zeroes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.descriptors import BlockPairs
from kvferry.worker.caches import KvCaches, TailEraser
from kvferry.worker.device import HostClock, clock_for
from kvferry.worker.fabric import MemoryKind, Region
from tests.worker.toy_caches import CacheShape, ToyCaches

CPU = torch.device("cpu")


def pairs_of(*blocks: int) -> BlockPairs:
    return BlockPairs(np.array(blocks, dtype=np.int64), np.zeros(len(blocks), dtype=np.int64))


@st.composite
def shapes(draw: st.DrawFn) -> CacheShape:
    tile_tokens = draw(st.sampled_from((1, 1, 2)))
    return CacheShape(
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        blocks=draw(st.integers(1, 5)),
        block_tokens=tile_tokens * draw(st.integers(1, 4)),
        tile_tokens=tile_tokens,
        cell_bytes=draw(st.integers(1, 9)),
        axes="".join(draw(st.permutations("bht"))),
        gap_bytes=draw(st.sampled_from((0, 0, 5))),
        one_storage=draw(st.booleans()),
    )


@given(shape=shapes(), draw=st.data())
def test_exactly_the_cells_after_the_last_token_are_zeroed_in_every_tensor(
    shape: CacheShape, draw: st.DataObject
) -> None:
    caches = ToyCaches(shape, poison=0xA5)
    stop = draw.draw(st.integers(1, shape.blocks * shape.block_tokens), label="stop")
    count = -(-stop // shape.block_tokens)
    blocks = draw.draw(st.permutations(range(shape.blocks)), label="blocks")[:count]
    last, used = blocks[-1], -(-(stop - (count - 1) * shape.block_tokens) // shape.tile_tokens)
    expected = caches.snapshot()
    for layer in range(shape.layers):
        for head in range(shape.heads):
            for tile in range(used, shape.tiles):
                caches.cells(layer, expected)[last, head, tile] = 0
    mark = TailEraser(caches.kv).erase({0: pairs_of(*blocks)}, stop)
    for found, wanted in zip(caches.memory, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert (mark is None) == (used == shape.tiles)
    assert mark is None or mark.reached()


def test_a_cell_that_is_a_whole_block_is_left_alone() -> None:
    caches = ToyCaches(CacheShape(block_tokens=4, tile_tokens=4, cell_bytes=64), poison=0xA5)
    before = caches.snapshot()
    assert TailEraser(caches.kv).erase({0: pairs_of(1, 2)}, 5) is None
    for found, wanted in zip(caches.memory, before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_groups_that_were_not_loaded_keep_their_bytes() -> None:
    caches = ToyCaches(CacheShape(layers=2), poison=0xA5)
    first, second = caches.kv.tensors
    moved = (first, msgspec.structs.replace(second, group=1))
    kv = KvCaches(caches.kv.storages, moved, CPU)
    assert TailEraser(kv).erase({0: pairs_of(3), 1: pairs_of()}, 2) is not None
    assert not caches.cells(0)[3, :, 2:].any()
    assert (caches.memory[1] == 0xA5).all()


def test_a_tensor_outside_all_allocations_is_refused_by_name() -> None:
    caches = ToyCaches(CacheShape(layers=1), poison=0)
    astray = msgspec.structs.replace(caches.kv.tensors[0], base=caches.kv.tensors[0].base + 10**6)
    with pytest.raises(ValueError, match=r"layers\.0/kv"):
        TailEraser(KvCaches(caches.kv.storages, (astray,), CPU))


def test_an_allocation_is_registered_once_and_whole_however_many_views_there_are() -> None:
    shared = torch.zeros(1024, dtype=torch.float32)
    other = torch.zeros(7, dtype=torch.uint8)
    views = (shared[:10], shared[512:].view(torch.bfloat16), shared.view(32, 32).t(), other, other[3:])
    regions = KvCaches(views, (), CPU).regions()
    assert regions == [
        Region(shared.data_ptr(), 4096, MemoryKind.DRAM, 0),
        Region(other.data_ptr(), 7, MemoryKind.DRAM, 0),
    ]


def test_host_memory_is_dram_of_device_0_and_a_gpu_is_named_by_its_ordinal() -> None:
    assert KvCaches((), (), CPU).kind is MemoryKind.DRAM
    assert KvCaches((), (), CPU).device_index == 0
    gpu = KvCaches((), (), torch.device("cuda:3"))
    assert (gpu.kind, gpu.device_index) == (MemoryKind.VRAM, 3)


def test_on_the_cpu_what_was_launched_has_finished() -> None:
    clock = clock_for(CPU)
    assert isinstance(clock, HostClock)
    assert clock.mark().reached()
