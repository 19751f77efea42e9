"""Reads and refusals of every `Fabric`, tested against the fake and against NIXL.

Outcomes are the bytes on both sides and the errors raised. Peers and notifications: `test_conformance_peers.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.worker.fabric.errors import (
    DescriptorOutOfRange,
    FabricError,
    FabricUnavailable,
    InvalidFabricRequest,
)
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Indices,
    MemoryKind,
    Region,
    TransferState,
)
from tests.worker.fabric.harness import (
    Harness,
    finish,
    indices,
    random_bytes,
    region,
    row,
    rows,
)
from tests.worker.fabric.scenes import GUARD, AgentPair

# -- reads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_reads_of_strided_rows_land_byte_exact_and_touch_nothing_else(
    harness: Harness, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    pair = AgentPair(harness, size=1 << 18, seed=seed)
    length = int(draw.choice([1, 8, 100, 256, 4096]))
    layouts = []
    for memory in (pair.source, pair.target):
        described, offset = [], int(draw.integers(0, 64))
        for _ in range(int(draw.integers(1, 4))):
            stride = length + int(draw.choice([0, 1, 24, 512]))
            count = int(draw.integers(1, 12))
            described.append(row(memory, offset, length, stride, count))
            offset += stride * count + int(draw.integers(0, 100))
        layouts.append(rows(*described))
    places = [
        [
            address + j * stride - int(memory.ctypes.data)
            for address, _, _, stride, count in layout.rows
            for j in range(count)
        ]
        for memory, layout in zip((pair.source, pair.target), layouts, strict=True)
    ]
    remote, local = (
        pair.consumer.prepare_remote(pair.peer, layouts[0]),
        pair.consumer.prepare_local(layouts[1]),
    )
    assert (remote.count, local.count) == (len(places[0]), len(places[1]))
    n = int(draw.integers(1, local.count + 1))
    into = draw.permutation(local.count)[:n].astype(np.int32)
    out_of = draw.integers(0, remote.count, n).astype(np.int32)

    expected, source = pair.target.copy(), pair.source.copy()
    for i, j in zip(into, out_of, strict=True):
        expected[places[1][i] :][:length] = source[places[0][j] :][:length]
    pair.read(local, into, remote, out_of)

    assert np.array_equal(pair.target, expected), f"seed {seed}"
    assert np.array_equal(pair.source, source), (
        f"seed {seed}: the producer's memory was changed"
    )


def test_one_registered_region_can_be_read_into_another_of_the_same_agent_pair(
    pair: AgentPair,
) -> None:
    more_source, more_target = random_bytes(8, 4096), np.zeros(4096, dtype=np.uint8)
    pair.producer.register([region(more_source)])
    pair.consumer.register([region(more_target)])
    pair.consumer.remove_peer(pair.peer)
    pair.peer = pair.consumer.add_peer(pair.producer.metadata())
    remote = pair.consumer.prepare_remote(
        pair.peer, rows(row(more_source, 0, 64, 64, 1), row(pair.source, 0, 64, 64, 1))
    )
    local = pair.consumer.prepare_local(
        rows(row(pair.target, 0, 64, 64, 1), row(more_target, 0, 64, 64, 1))
    )
    pair.read(local, indices(0, 1), remote, indices(0, 1))
    assert np.array_equal(pair.target[:64], more_source[:64])
    assert np.array_equal(more_target[:64], pair.source[:64])


def test_a_finished_transfer_stays_done_and_tells_what_it_moved(
    pair: AgentPair,
) -> None:
    transfer = pair.consumer.post_read(
        pair.local(), indices(0, 2, 5), pair.remote(), indices(9, 3, 1)
    )
    finish(pair.consumer, transfer)
    assert pair.consumer.poll(transfer) is TransferState.DONE
    reported = pair.consumer.telemetry(transfer)
    assert reported is not None
    assert (reported.bytes, reported.descriptors) == (3 * 64, 3)
    assert transfer.peer == "producer"


def test_an_empty_read_is_done_and_writes_nothing(pair: AgentPair) -> None:
    transfer = pair.consumer.post_read(
        pair.local(), indices(), pair.remote(), indices()
    )
    assert pair.consumer.poll(transfer) is TransferState.DONE
    assert pair.consumer.telemetry(transfer) is None
    assert (pair.target == GUARD).all()


def test_prepared_lists_may_be_released_while_a_read_from_them_is_in_flight(
    pair: AgentPair,
) -> None:
    local, remote = pair.local(count=500), pair.remote(count=500)
    transfer = pair.consumer.post_read(
        local, np.arange(500, dtype=np.int32), remote, np.arange(500, dtype=np.int32)
    )
    pair.consumer.release(local)
    pair.consumer.release(remote)
    finish(pair.consumer, transfer)
    assert np.array_equal(pair.target[:32000], pair.source[:32000])


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "length", "stride", "count"),
    [(0, 65, 65, 64), (-1, 64, 64, 1), (4033, 64, 64, 1), (0, 64, 64, 65), (0, 64, 4033, 2), (0, 8, 2**62, 2)],
)  # fmt: skip
def test_rows_that_leave_the_registered_memory_are_refused(
    harness: Harness, offset: int, length: int, stride: int, count: int
) -> None:
    pair = AgentPair(harness, size=4096)
    for side in (pair.local, pair.remote):
        with pytest.raises(DescriptorOutOfRange):
            side(offset=offset, length=length, stride=stride, count=count)
    assert pair.remote(count=64).count == 64  # the whole region, to the last byte


def test_a_row_across_two_regions_is_refused_even_if_its_descriptors_lie_inside(
    harness: Harness,
) -> None:
    memory = random_bytes(1, 3000)
    producer, consumer = harness.fabric("producer"), harness.fabric("consumer")
    base = memory.ctypes.data
    producer.register(
        [
            Region(base, 1000, MemoryKind.DRAM),
            Region(base + 2000, 1000, MemoryKind.DRAM),
        ]
    )
    peer = consumer.add_peer(producer.metadata())
    with pytest.raises(DescriptorOutOfRange):
        consumer.prepare_remote(peer, rows((base, 10, 0, 2000, 2)))
    assert (
        consumer.prepare_remote(
            peer, rows((base, 10, 0, 10, 100), (base + 2000, 10, 0, 10, 100))
        ).count
        == 200
    )


def test_rows_of_another_kind_or_device_are_refused(pair: AgentPair) -> None:
    address = pair.source.ctypes.data
    with pytest.raises(FabricError):
        pair.consumer.prepare_remote(
            pair.peer,
            DescriptorRows.from_tuples(MemoryKind.VRAM, [(address, 64, 0, 64, 1)]),
        )
    with pytest.raises(DescriptorOutOfRange):
        pair.consumer.prepare_remote(pair.peer, rows((address, 64, 3, 64, 1)))


def test_memory_registered_after_the_metadata_was_made_is_out_of_range(
    pair: AgentPair,
) -> None:
    later = random_bytes(2, 4096)
    pair.producer.register([region(later)])
    with pytest.raises(DescriptorOutOfRange):
        pair.consumer.prepare_remote(pair.peer, rows(row(later, 0, 64, 64, 1)))


@pytest.mark.parametrize("bad", [-1, 16, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_an_index_out_of_range_is_refused_and_nothing_is_read(
    pair: AgentPair, bad: int, side: str
) -> None:
    good, broken = indices(0, 1), indices(0, bad)
    into, out_of = (broken, good) if side == "local" else (good, broken)
    with pytest.raises(InvalidFabricRequest, match=f"{side} index {bad} "):
        pair.consumer.post_read(pair.local(), into, pair.remote(), out_of)
    assert (pair.target == GUARD).all()


@pytest.mark.parametrize(
    ("into", "out_of"),
    [
        (indices(0, 1), indices(0)),
        (indices(), indices(0)),
        (indices(0, 1), np.array([0, 1], dtype=np.int64)),
        (np.array([0.0, 1.0], dtype=np.float32), indices(0, 1)),
        (indices(0, 1, 2, 3)[::2], indices(0, 1)),
        (indices(0, 1).reshape(1, 2), indices(0)),
    ],
    ids=[
        "unequal",
        "empty against one",
        "int64",
        "float32",
        "not contiguous",
        "two-dimensional",
    ],
)
def test_index_arrays_of_the_wrong_form_are_refused(
    pair: AgentPair, into: Indices, out_of: Indices
) -> None:
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.post_read(pair.local(), into, pair.remote(), out_of)
    assert (pair.target == GUARD).all()


def test_a_pair_of_descriptors_of_unequal_length_is_refused(pair: AgentPair) -> None:
    with pytest.raises(InvalidFabricRequest):
        pair.consumer.post_read(
            pair.local(length=64), indices(0), pair.remote(length=32), indices(0)
        )
    assert (pair.target == GUARD).all()


def test_memory_that_cannot_be_registered_raises_fabric_unavailable(
    pair: AgentPair,
) -> None:
    with pytest.raises(FabricUnavailable):
        pair.producer.register([Region(0, 4096, MemoryKind.DRAM)])
    pair.producer.register([])
