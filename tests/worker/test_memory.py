"""A worker's memory: what is registered of its caches, entries for slot reads, and pinned host memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.hosts import ChannelAddress
from kvferry.protocol.slots import (
    SLOT_BYTES,
)
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import HOST, Device, HostMemory
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region, TransferState
from kvferry.worker.fabric.reads import SlotReads
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork


def test_an_allocation_is_registered_once_and_whole_however_many_views_there_are() -> (
    None
):
    shared = torch.zeros(1024, dtype=torch.float32)
    other = torch.zeros(7, dtype=torch.uint8)
    views = (
        shared[:10],
        shared[512:].view(torch.bfloat16),
        shared.view(32, 32).t(),
        other,
        other[3:],
    )
    regions = KvCaches(views, (), HOST).regions()
    assert regions == [
        Region(shared.data_ptr(), 4096, MemoryKind.DRAM, 0),
        Region(other.data_ptr(), 7, MemoryKind.DRAM, 0),
    ]


def test_host_memory_is_dram_of_device_0_and_a_gpu_is_named_by_its_ordinal() -> None:
    assert KvCaches((), (), HOST).kind is MemoryKind.DRAM
    assert KvCaches((), (), HOST).device_index == 0
    gpu = KvCaches((), (), Device(torch.device("cuda:3")))
    assert (gpu.kind, gpu.device_index) == (MemoryKind.VRAM, 3)


PEERS = [("10.0.0.1", 1), ("10.0.0.1", 2), ("10.0.0.2", 1)]


@given(
    wishes=st.lists(
        st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from(PEERS)), max_size=60
    )
)
def test_a_peer_gets_no_entry_that_would_leave_fewer_free_than_it_then_has(
    wishes: list[tuple[bool, int, ChannelAddress]],
) -> None:
    slot_reads, owned = SlotReads(32), list[tuple[tuple[int, ...], ChannelAddress]]()
    for take, number, peer in wishes:
        if take:
            entries = slot_reads.try_take(number, peer)
            held = sum(len(one) for one, owner in owned if owner == peer) + number
            free = 32 - sum(len(one) for one, _ in owned) - number
            assert (entries is None) == (free < held)
            if entries is not None:
                owned.append((entries, peer))
        elif owned:
            slot_reads.give_back(*owned.pop(number % len(owned)))
        assert slot_reads.free() or not owned, "there are some for the next peer"
    for entries, peer in owned:
        slot_reads.give_back(entries, peer)
    assert slot_reads.free() == 32


@given(wishes=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_entry_has_two_owners_and_all_come_back(
    wishes: list[tuple[bool, int]],
) -> None:
    slot_reads, owned = SlotReads(8), list[tuple[int, ...]]()
    for take, number in wishes:
        if take:
            entries = slot_reads.try_take(number)
            taken = sum(len(one) for one in owned)
            assert (entries is None) == (number > 8 - taken)
            if entries is not None:
                assert len(entries) == number
                owned.append(entries)
        elif owned:
            slot_reads.give_back(owned.pop(number % len(owned)))
        out = [entry for one in owned for entry in one]
        assert len(set(out)) == len(out)
        assert set(out) <= set(range(8))
        assert slot_reads.free() == 8 - len(out)


def test_a_slot_is_read_into_its_entry_and_into_no_other() -> None:
    network = MemoryNetwork()
    producer, consumer = MemoryFabric("p", network), MemoryFabric("c", network)
    slots = np.arange(1, 9, dtype=np.uint64).reshape(4, 2)
    producer.register([Region(slots.ctypes.data, slots.nbytes, MemoryKind.DRAM)])
    slot_reads = SlotReads(6)
    consumer.register([slot_reads.region()])
    slot_reads.prepare(consumer)
    peer = consumer.add_peer(producer.metadata())
    row = (slots.ctypes.data, SLOT_BYTES, 0, SLOT_BYTES, len(slots))
    remote = consumer.prepare_remote(
        peer, DescriptorRows.from_tuples(MemoryKind.DRAM, [row])
    )
    read = consumer.post_read(
        slot_reads.descriptors,
        np.array([5, 2], dtype=np.int32),
        remote,
        np.array([0, 3], dtype=np.int32),
    )
    assert consumer.poll(read) is TransferState.DONE
    assert slot_reads.words.tolist() == [0, 0, 7, 0, 0, 1]
    assert slot_reads.progress.tolist() == [0, 0, 8, 0, 0, 2]


def test_the_system_is_asked_for_huge_pages() -> None:
    memory = HostMemory(8 << 20, HOST)
    inside, flags = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2:
            inside = int(bounds[0], 16) <= memory.tensor.data_ptr() < int(bounds[1], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert (
        "hg" in flags.split()
        or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    )
