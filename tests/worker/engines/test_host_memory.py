"""Host memory of engines whose fabric does not reach their device: how much is pinned, when, and for which roles."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.protocol.errors import InvalidConfig
from kvferry.worker.caches import HostMemory
from tests.fakes.cuda import FakeCuda
from tests.fakes.memory_fabric import MemoryFabric
from tests.harness.cache_engine import SETTINGS
from tests.harness.engine import Engine
from tests.harness.rig import Rig

POOL_BYTES = 65 << 12
ON_HOST = replace(SETTINGS, host_buffer=True, staging_pool_bytes=POOL_BYTES)


def pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def mirror_bytes(engine: Engine) -> list[int]:
    return [pages(part.nbytes) for part in engine.caches.memory]


def test_a_producer_pins_its_caches_copy_and_its_pool_in_whole_pages_and_no_more(cuda: FakeCuda, rig: Rig) -> None:
    with cuda.memory():
        producer = rig.engine("P", device=cuda.device, settings=ON_HOST)
    assert sorted(cuda.registered.values()) == sorted([*mirror_bytes(producer), POOL_BYTES])
    assert not any(address % mmap.PAGESIZE for address in cuda.registered)


def test_a_consumer_pins_its_pool_and_keeps_and_registers_no_copy_of_its_caches(cuda: FakeCuda, rig: Rig) -> None:
    with cuda.memory():
        producer = rig.engine("P", device=cuda.device, settings=ON_HOST)
        before = set(cuda.registered)
        consumer = rig.engine("C", device=cuda.device, settings=replace(ON_HOST, is_read_from=False))
    assert [length for address, length in cuda.registered.items() if address not in before] == [POOL_BYTES]
    fabric = consumer.fabric.inner
    assert isinstance(fabric, MemoryFabric)
    starts = {tensor.untyped_storage().data_ptr() for tensor in consumer.caches.kv.storages}
    assert not starts & {region.address for region in fabric._regions}
    rig.transfer(producer, consumer)
    assert not cuda.strays()


def test_memory_is_unpinned_once_and_after_the_transfer_thread_and_the_fabric_have_ended(
    cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda.memory():
        producer, consumer = rig.pair(device=cuda.device, settings=ON_HOST)
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
    assert cuda.names().count("cudaHostUnregister") == everything // 2 == len(cuda.registered)
    last = cuda.names().index("cudaHostUnregister")
    thread = producer.worker._thread
    assert not thread._thread.is_alive()
    assert {call.name for call in cuda.calls[last:]} == {"cudaHostUnregister"}


def test_memory_that_cannot_be_pinned_stops_the_start_with_its_size(cuda: FakeCuda, rig: Rig) -> None:
    cuda.host_error = 2
    with cuda.memory(), pytest.raises(InvalidConfig, match=r"room for \d+ bytes .* error 2") as refused:
        rig.engine("P", device=cuda.device, settings=ON_HOST)
    assert refused.value.field == "kv_buffer_device"


def test_a_start_that_cannot_pin_all_of_its_memory_unpins_the_rest(
    cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is pinned first, then the copy of the caches, part by part."""
    register = cuda.cudaHostRegister
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *of: 2 if len(cuda.registered) == 2 else register(*of))
    with cuda.memory(), pytest.raises(InvalidConfig, match="error 2"):
        rig.engine("P", device=cuda.device, settings=ON_HOST)
    assert cuda.names().count("cudaHostUnregister") == 2
    assert not cuda.registered


def test_memory_that_the_system_does_not_have_is_refused_by_its_size() -> None:
    with pytest.raises(InvalidConfig, match=rf"room for {1 << 60} bytes"):
        HostMemory(1 << 60, torch.device("cpu"))


def test_the_system_is_asked_for_huge_pages() -> None:
    memory = HostMemory(8 << 20, torch.device("cpu"))
    inside, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2:
            inside = int(bounds[0], 16) <= memory.tensor.data_ptr() < int(bounds[1], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()
