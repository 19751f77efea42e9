"""Entries for slot reads: each belongs to one reader at a time, and descriptor `i` reads into entry `i`."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region, TransferState
from kvferry.worker.fabric.reads import SlotReads
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork


@given(wishes=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_entry_has_two_owners_and_all_come_back(wishes: list[tuple[bool, int]]) -> None:
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
    slots = np.arange(1, 5, dtype=np.uint64)
    producer.register([Region(slots.ctypes.data, slots.nbytes, MemoryKind.DRAM)])
    slot_reads = SlotReads(6)
    consumer.register([slot_reads.region()])
    slot_reads.prepare(consumer)
    peer = consumer.add_peer(producer.metadata())
    row = (slots.ctypes.data, 8, 0, 8, len(slots))
    remote = consumer.prepare_remote(peer, DescriptorRows.of(MemoryKind.DRAM, [row]))
    read = consumer.post_read(
        slot_reads.descriptors, np.array([5, 2], dtype=np.int32), remote, np.array([0, 3], dtype=np.int32)
    )
    assert consumer.poll(read) is TransferState.DONE
    assert slot_reads.words.tolist() == [0, 0, 4, 0, 0, 1]
