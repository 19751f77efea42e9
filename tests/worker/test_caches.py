"""The memory that is registered for a worker's caches."""

from __future__ import annotations

import torch

from kvferry.worker.caches import DeviceClock, KvCaches
from kvferry.worker.fabric.port import MemoryKind, Region

CPU = torch.device("cpu")


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
    clock = DeviceClock(CPU)
    assert clock.mark().reached()
