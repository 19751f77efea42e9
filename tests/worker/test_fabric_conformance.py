"""What every `Fabric` promises, against the fake and against NIXL.

A consumer reads from a producer's memory; outcomes are the bytes on both sides, what was raised, what arrived.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvferry.worker.fabric import (
    MAX_NOTIFICATION_BYTES,
    DescriptorOutOfRange,
    DescriptorRows,
    FabricClosed,
    FabricError,
    FabricUnavailable,
    Indices,
    InvalidMetadata,
    InvalidRequest,
    LocalDescriptors,
    MemoryKind,
    PeerAgent,
    PeerLost,
    Region,
    RemoteDescriptors,
    Transfer,
    TransferState,
)
from tests.worker.fabric_harness import (
    Harness,
    Memory,
    MemoryHarness,
    NixlHarness,
    NixlTcpHarness,
    arrivals,
    finish,
    indices,
    random_bytes,
    region,
    row,
    rows,
)

GUARD = 0xA5
LOST_WITHIN_S = 10.0


@pytest.fixture(params=[MemoryHarness, NixlHarness, NixlTcpHarness], ids=["memory", "nixl", "nixl-tcp"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with contextlib.closing(request.param()) as made:
        yield made


@pytest.fixture(params=[MemoryHarness, NixlTcpHarness], ids=["memory", "nixl-tcp"])
def waiting_harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """Transports that need the peer's help for a read. Over CMA the kernel reads from a frozen process as well."""
    with contextlib.closing(request.param()) as made:
        yield made


class Pair:
    """A producer with random bytes and a consumer with guard bytes, introduced to each other."""

    def __init__(self, harness: Harness, size: int = 1 << 16, seed: int = 7) -> None:
        self.source: Memory = random_bytes(seed, size)
        self.target: Memory = np.full(size, GUARD, dtype=np.uint8)
        self.producer, self.consumer = harness.fabric("producer"), harness.fabric("consumer")
        self.producer.register([region(self.source)])
        self.consumer.register([region(self.target)])
        self.peer = self.consumer.add_peer(self.producer.metadata())

    def local(self, offset: int = 0, length: int = 64, stride: int = 64, count: int = 16) -> LocalDescriptors:
        return self.consumer.prepare_local(rows(row(self.target, offset, length, stride, count)))

    def remote(self, offset: int = 0, length: int = 64, stride: int = 64, count: int = 16) -> RemoteDescriptors:
        return self.consumer.prepare_remote(self.peer, rows(row(self.source, offset, length, stride, count)))

    def read(self, local: LocalDescriptors, into: Indices, remote: RemoteDescriptors, out_of: Indices) -> None:
        transfer = self.consumer.post_read(local, into, remote, out_of)
        finish(self.consumer, transfer)
        self.consumer.release(transfer)


@pytest.fixture
def pair(harness: Harness) -> Pair:
    return Pair(harness)


# -- reads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_reads_of_strided_rows_land_byte_exact_and_touch_nothing_else(harness: Harness, seed: int) -> None:
    draw = np.random.default_rng(seed)
    pair = Pair(harness, size=1 << 18, seed=seed)
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
    remote, local = pair.consumer.prepare_remote(pair.peer, layouts[0]), pair.consumer.prepare_local(layouts[1])
    assert (remote.count, local.count) == (len(places[0]), len(places[1]))
    n = int(draw.integers(1, local.count + 1))
    into = draw.permutation(local.count)[:n].astype(np.int32)
    out_of = draw.integers(0, remote.count, n).astype(np.int32)

    expected, source = pair.target.copy(), pair.source.copy()
    for i, j in zip(into, out_of, strict=True):
        expected[places[1][i] :][:length] = source[places[0][j] :][:length]
    pair.read(local, into, remote, out_of)

    assert np.array_equal(pair.target, expected), f"seed {seed}"
    assert np.array_equal(pair.source, source), f"seed {seed}: the producer's memory was changed"


def test_ascending_neighbours_land_byte_exact_when_the_fabric_merges_them(pair: Pair) -> None:
    pair.read(
        pair.local(offset=128, count=500), np.arange(500, dtype=np.int32),
        pair.remote(offset=4096, count=500), np.arange(500, dtype=np.int32),
    )  # fmt: skip
    assert np.array_equal(pair.target[128 : 128 + 32000], pair.source[4096 : 4096 + 32000])
    assert (pair.target[:128] == GUARD).all()
    assert (pair.target[128 + 32000 :] == GUARD).all()


def test_descriptors_are_numbered_row_by_row(pair: Pair) -> None:
    """The example in `DescriptorRows`, with bases: descriptor 2 is [128, 144), descriptor 3 is [8000, 8008)."""
    remote = pair.consumer.prepare_remote(
        pair.peer, rows(row(pair.source, 0, 16, 64, 3), row(pair.source, 8000, 8, 8, 2))
    )
    assert remote.count == 5
    local = pair.consumer.prepare_local(rows(row(pair.target, 0, 16, 16, 1), row(pair.target, 100, 8, 8, 1)))
    pair.read(local, indices(0, 1), remote, indices(2, 3))
    assert np.array_equal(pair.target[:16], pair.source[128:144])
    assert np.array_equal(pair.target[100:108], pair.source[8000:8008])


def test_one_registered_region_can_be_read_into_another_of_the_same_agent_pair(pair: Pair) -> None:
    more_source, more_target = random_bytes(8, 4096), np.zeros(4096, dtype=np.uint8)
    pair.producer.register([region(more_source)])
    pair.consumer.register([region(more_target)])
    pair.consumer.remove_peer(pair.peer)
    pair.peer = pair.consumer.add_peer(pair.producer.metadata())
    remote = pair.consumer.prepare_remote(
        pair.peer, rows(row(more_source, 0, 64, 64, 1), row(pair.source, 0, 64, 64, 1))
    )
    local = pair.consumer.prepare_local(rows(row(pair.target, 0, 64, 64, 1), row(more_target, 0, 64, 64, 1)))
    pair.read(local, indices(0, 1), remote, indices(0, 1))
    assert np.array_equal(pair.target[:64], more_source[:64])
    assert np.array_equal(more_target[:64], pair.source[:64])


def test_memory_of_torch_tensors_can_be_registered_and_read(harness: Harness) -> None:
    source = torch.arange(4096, dtype=torch.int32)
    target = torch.zeros(4096, dtype=torch.int32)
    producer, consumer = harness.fabric("producer"), harness.fabric("consumer")
    for fabric, tensor in ((producer, source), (consumer, target)):
        fabric.register([Region(tensor.data_ptr(), tensor.nbytes, MemoryKind.DRAM)])
    peer = consumer.add_peer(producer.metadata())
    local = consumer.prepare_local(rows((target.data_ptr(), 1024, 0, 1024, 16)))
    remote = consumer.prepare_remote(peer, rows((source.data_ptr(), 1024, 0, 1024, 16)))
    finish(consumer, consumer.post_read(local, indices(3, 5), remote, indices(4, 6)))
    assert torch.equal(target[3 * 256 : 4 * 256], source[4 * 256 : 5 * 256])
    assert torch.equal(target[5 * 256 : 6 * 256], source[6 * 256 : 7 * 256])
    assert int(target[: 3 * 256].abs().sum()) == 0


def test_read_only_index_arrays_are_accepted(pair: Pair) -> None:
    fixed = indices(1, 2)
    fixed.setflags(write=False)
    pair.read(pair.local(), fixed, pair.remote(), fixed)
    assert np.array_equal(pair.target[64:192], pair.source[64:192])


def test_a_finished_transfer_stays_done_and_tells_what_it_moved(pair: Pair) -> None:
    transfer = pair.consumer.post_read(pair.local(), indices(0, 2, 5), pair.remote(), indices(9, 3, 1))
    finish(pair.consumer, transfer)
    assert pair.consumer.poll(transfer) is TransferState.DONE
    told = pair.consumer.telemetry(transfer)
    assert told is not None
    assert (told.bytes, told.descriptors) == (3 * 64, 3)
    assert transfer.peer == "producer"


def test_an_empty_read_is_done_and_writes_nothing(pair: Pair) -> None:
    transfer = pair.consumer.post_read(pair.local(), indices(), pair.remote(), indices())
    assert pair.consumer.poll(transfer) is TransferState.DONE
    assert pair.consumer.telemetry(transfer) is None
    assert (pair.target == GUARD).all()


def test_prepared_lists_may_be_released_while_a_read_from_them_is_in_flight(pair: Pair) -> None:
    local, remote = pair.local(count=500), pair.remote(count=500)
    transfer = pair.consumer.post_read(local, np.arange(500, dtype=np.int32), remote, np.arange(500, dtype=np.int32))
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
    pair = Pair(harness, size=4096)
    for side in (pair.local, pair.remote):
        with pytest.raises(DescriptorOutOfRange):
            side(offset=offset, length=length, stride=stride, count=count)
    assert pair.remote(count=64).count == 64  # the whole region, to the last byte


def test_one_row_out_of_range_among_good_ones_is_refused(pair: Pair) -> None:
    good, bad = row(pair.source, 0, 64, 64, 4), row(pair.source, pair.source.nbytes - 63, 64, 64, 1)
    with pytest.raises(DescriptorOutOfRange) as refusal:
        pair.consumer.prepare_remote(pair.peer, rows(good, bad))
    assert (refusal.value.operation, refusal.value.peer) == ("prepare remote", "producer")


def test_a_row_across_two_regions_is_refused_even_if_its_descriptors_lie_inside(harness: Harness) -> None:
    memory = random_bytes(1, 3000)
    producer, consumer = harness.fabric("producer"), harness.fabric("consumer")
    base = memory.ctypes.data
    producer.register([Region(base, 1000, MemoryKind.DRAM), Region(base + 2000, 1000, MemoryKind.DRAM)])
    peer = consumer.add_peer(producer.metadata())
    with pytest.raises(DescriptorOutOfRange):
        consumer.prepare_remote(peer, rows((base, 10, 0, 2000, 2)))
    assert consumer.prepare_remote(peer, rows((base, 10, 0, 10, 100), (base + 2000, 10, 0, 10, 100))).count == 200


def test_rows_of_another_kind_or_device_are_refused(pair: Pair) -> None:
    address = pair.source.ctypes.data
    with pytest.raises(FabricError):
        pair.consumer.prepare_remote(pair.peer, DescriptorRows.of(MemoryKind.VRAM, [(address, 64, 0, 64, 1)]))
    with pytest.raises(DescriptorOutOfRange):
        pair.consumer.prepare_remote(pair.peer, rows((address, 64, 3, 64, 1)))


def test_memory_registered_after_the_metadata_was_made_is_out_of_range(pair: Pair) -> None:
    later = random_bytes(2, 4096)
    pair.producer.register([region(later)])
    with pytest.raises(DescriptorOutOfRange):
        pair.consumer.prepare_remote(pair.peer, rows(row(later, 0, 64, 64, 1)))


@pytest.mark.parametrize("bad", [-1, 16, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_an_index_out_of_range_is_refused_and_nothing_is_read(pair: Pair, bad: int, side: str) -> None:
    good, broken = indices(0, 1), indices(0, bad)
    into, out_of = (broken, good) if side == "local" else (good, broken)
    with pytest.raises(InvalidRequest, match=f"{side} index {bad} "):
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
    ids=["unequal", "empty against one", "int64", "float32", "not contiguous", "two-dimensional"],
)
def test_index_arrays_of_the_wrong_form_are_refused(pair: Pair, into: Indices, out_of: Indices) -> None:
    with pytest.raises(InvalidRequest):
        pair.consumer.post_read(pair.local(), into, pair.remote(), out_of)
    assert (pair.target == GUARD).all()


def test_a_pair_of_descriptors_of_unequal_length_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequest):
        pair.consumer.post_read(pair.local(length=64), indices(0), pair.remote(length=32), indices(0))
    assert (pair.target == GUARD).all()


def test_memory_that_cannot_be_registered_raises_fabric_unavailable(pair: Pair) -> None:
    with pytest.raises(FabricUnavailable):
        pair.producer.register([Region(0, 4096, MemoryKind.DRAM)])
    pair.producer.register([])


# -- peers -------------------------------------------------------------------------------------------------------


def test_a_removed_peer_can_be_added_again_and_its_old_descriptors_stay_dead(pair: Pair) -> None:
    local, old = pair.local(), pair.remote()
    pair.read(local, indices(0), old, indices(0))
    pair.consumer.remove_peer(pair.peer)
    pair.consumer.remove_peer(pair.peer)
    with pytest.raises(PeerLost):
        pair.consumer.post_read(local, indices(0), old, indices(0))
    with pytest.raises(PeerLost):
        pair.remote()
    assert pair.consumer.add_peer(pair.producer.metadata()) == pair.peer
    with pytest.raises(PeerLost):
        pair.consumer.post_read(local, indices(0), old, indices(0))
    pair.consumer.release(old)
    pair.read(local, indices(5), pair.remote(), indices(6))
    assert np.array_equal(pair.target[320:384], pair.source[384:448])


def test_adding_a_known_peer_is_refused_and_leaves_its_descriptors_alive(pair: Pair) -> None:
    local, remote = pair.local(), pair.remote()
    with pytest.raises(InvalidMetadata) as refusal:
        pair.consumer.add_peer(pair.producer.metadata())
    assert refusal.value.peer == "producer"
    pair.read(local, indices(0), remote, indices(0))
    assert np.array_equal(pair.target[:64], pair.source[:64])


def test_an_agent_cannot_be_its_own_peer(pair: Pair) -> None:
    with pytest.raises(InvalidMetadata):
        pair.consumer.add_peer(pair.consumer.metadata())


def test_a_removed_peer_can_be_replaced_by_another_agent_of_its_name(harness: Harness, pair: Pair) -> None:
    pair.read(pair.local(), indices(0), pair.remote(), indices(0))
    pair.producer.close()
    pair.producer = harness.fabric("producer")
    pair.producer.register([region(pair.source)])
    pair.consumer.remove_peer(pair.peer)
    assert pair.consumer.add_peer(pair.producer.metadata()) == pair.peer
    pair.read(pair.local(), indices(7), pair.remote(), indices(8))
    assert np.array_equal(pair.target[448:512], pair.source[512:576])


def test_a_read_in_flight_outlives_the_removal_of_its_peer_and_nothing_else_does(waiting_harness: Harness) -> None:
    mortal = Mortal(waiting_harness)
    mortal.read()
    mortal.target[:] = GUARD
    mortal.producer.freeze()
    transfer = mortal.post()
    mortal.consumer.remove_peer(mortal.peer)
    for attempt in (mortal.post, lambda: mortal.consumer.notify(mortal.peer, b"?")):
        with pytest.raises(PeerLost):
            attempt()
    with pytest.raises(InvalidMetadata):
        mortal.consumer.add_peer(mortal.producer.metadata)
    mortal.producer.thaw()
    finish(mortal.consumer, transfer)
    assert np.array_equal(mortal.target, mortal.content)
    assert mortal.consumer.add_peer(mortal.producer.metadata) == mortal.peer


def test_metadata_that_is_damaged_anywhere_is_refused_and_the_true_one_still_works(pair: Pair) -> None:
    pair.consumer.remove_peer(pair.peer)
    true = pair.producer.metadata()
    damaged = [true[:end] for end in range(len(true))]
    damaged += [true[:at] + bytes([true[at] ^ bit]) + true[at + 1 :] for at in range(len(true)) for bit in (1, 0x80)]
    damaged += [true + b"\0", b"nonsense", b"\xff" * 4096, true[:24] + b"\xff" * 8]
    for metadata in damaged:
        with pytest.raises(InvalidMetadata):
            pair.consumer.add_peer(metadata)
    assert pair.consumer.add_peer(true) == pair.peer
    pair.read(pair.local(), indices(0), pair.remote(), indices(0))
    assert np.array_equal(pair.target[:64], pair.source[:64])


@pytest.mark.parametrize("metadata", [None, 7, "text", bytearray(b"KVFABRC1" + bytes(64))])
def test_metadata_that_is_not_bytes_is_refused(pair: Pair, metadata: bytes) -> None:
    with pytest.raises(InvalidMetadata):
        pair.consumer.add_peer(metadata)


# -- notifications -----------------------------------------------------------------------------------------------


def test_notifications_arrive_whole_in_order_and_with_the_name_of_their_sender(pair: Pair) -> None:
    messages = [b"", b"\0", bytes(range(256)), b"plain", random_bytes(3, MAX_NOTIFICATION_BYTES).tobytes()]
    messages += [b"number %d" % number for number in range(500)]
    back = pair.producer.add_peer(pair.consumer.metadata())
    pair.producer.notify(back, b"from the producer")
    for message in messages:
        pair.consumer.notify(pair.peer, message)
    arrived = arrivals(pair.producer, len(messages))
    assert arrived == [("consumer", message) for message in messages]
    assert arrivals(pair.consumer, 1) == [("producer", b"from the producer")]
    assert pair.producer.take_notifications() == []


def test_a_notification_beyond_the_limit_is_refused_and_not_sent(pair: Pair) -> None:
    with pytest.raises(InvalidRequest):
        pair.consumer.notify(pair.peer, bytes(MAX_NOTIFICATION_BYTES + 1))
    pair.consumer.notify(pair.peer, b"next")
    assert arrivals(pair.producer, 1) == [("consumer", b"next")]


def test_notifying_an_unknown_or_removed_peer_raises_peer_lost(pair: Pair) -> None:
    with pytest.raises(PeerLost):
        pair.consumer.notify(PeerAgent("nobody"), b"hello")
    pair.consumer.remove_peer(pair.peer)
    with pytest.raises(PeerLost) as lost:
        pair.consumer.notify(pair.peer, b"hello")
    assert (lost.value.operation, lost.value.peer) == ("notify", "producer")


# -- death -------------------------------------------------------------------------------------------------------


class Mortal:
    """A consumer in this process and a producer that can be killed, after one good read."""

    def __init__(self, harness: Harness, name: str = "mortal") -> None:
        self.harness = harness
        self.target: Memory = np.full(1 << 16, GUARD, dtype=np.uint8)
        self.consumer = harness.fabric("survivor")
        self.consumer.register([region(self.target)])
        self.local = self.consumer.prepare_local(rows(row(self.target, 0, 64, 64, 1024)))
        self.meet(name)

    def meet(self, name: str, seed: int = 11) -> None:
        self.producer = self.harness.producer(name, seed, 1 << 16)
        self.content = random_bytes(seed, 1 << 16)
        self.peer = self.consumer.add_peer(self.producer.metadata)
        self.remote = self.consumer.prepare_remote(self.peer, rows((self.producer.address, 64, 0, 64, 1024)))

    def post(self) -> Transfer:
        everything = np.arange(1024, dtype=np.int32)
        return self.consumer.post_read(self.local, everything, self.remote, everything)

    def read(self) -> None:
        self.target[:] = GUARD
        finish(self.consumer, self.post())
        assert np.array_equal(self.target, self.content)

    def post_raises_peer_lost(self) -> bool:
        """One attempt; a transfer that could still be posted is polled until it raises."""
        with pytest.raises(PeerLost):
            finish(self.consumer, self.post(), LOST_WITHIN_S)
        return True


def test_another_process_is_read_and_notified_both_ways(harness: Harness) -> None:
    mortal = Mortal(harness)
    mortal.read()
    mortal.consumer.notify(mortal.peer, b"\0done\xff")
    assert mortal.producer.received() == ("survivor", b"\0done\xff")
    mortal.producer.send(mortal.consumer.metadata(), b"thanks\0")
    assert arrivals(mortal.consumer, 1) == [("mortal", b"thanks\0")]


def test_reading_from_a_killed_peer_raises_peer_lost_and_so_does_everything_after(harness: Harness) -> None:
    mortal = Mortal(harness)
    mortal.read()
    mortal.producer.kill()
    assert mortal.post_raises_peer_lost()
    for attempt in (
        mortal.post,
        lambda: mortal.consumer.prepare_remote(mortal.peer, rows((mortal.producer.address, 64, 0, 64, 1))),
        lambda: mortal.consumer.notify(mortal.peer, b"?"),
    ):
        with pytest.raises(PeerLost) as lost:
            attempt()
        assert lost.value.peer == "mortal"


@pytest.mark.parametrize("name", ["mortal", "successor"])
def test_after_a_peer_died_its_successor_is_read_under_the_same_or_another_name(harness: Harness, name: str) -> None:
    mortal = Mortal(harness)
    mortal.read()
    mortal.producer.kill()
    assert mortal.post_raises_peer_lost()
    mortal.consumer.release(mortal.remote)
    mortal.consumer.remove_peer(mortal.peer)
    mortal.meet(name, seed=12)
    mortal.read()


def test_a_read_from_a_frozen_peer_waits_and_lands_when_it_goes_on(waiting_harness: Harness) -> None:
    mortal = Mortal(waiting_harness)
    mortal.read()
    mortal.target[:] = GUARD
    mortal.producer.freeze()
    transfer = mortal.post()
    frozen_until = time.monotonic() + 0.1
    while time.monotonic() < frozen_until:
        assert mortal.consumer.poll(transfer) is TransferState.IN_FLIGHT
    assert mortal.consumer.telemetry(transfer) is None
    assert (mortal.target == GUARD).all()
    mortal.producer.thaw()
    finish(mortal.consumer, transfer)
    assert np.array_equal(mortal.target, mortal.content)


def test_reads_in_flight_from_a_peer_that_is_killed_raise_peer_lost_again_and_again(waiting_harness: Harness) -> None:
    mortal = Mortal(waiting_harness)
    mortal.producer.freeze()
    first, second = mortal.post(), mortal.post()
    assert mortal.consumer.poll(first) is TransferState.IN_FLIGHT
    mortal.producer.kill()
    for transfer in (first, second):
        for _ in range(2):
            with pytest.raises(PeerLost) as lost:
                finish(mortal.consumer, transfer, LOST_WITHIN_S)
            assert lost.value.peer == "mortal"
        assert mortal.consumer.telemetry(transfer) is None
        mortal.consumer.release(transfer)


# -- handles and the end -----------------------------------------------------------------------------------------


def test_release_is_idempotent_and_released_handles_are_refused(pair: Pair) -> None:
    local, remote = pair.local(), pair.remote()
    transfer = pair.consumer.post_read(local, indices(0), remote, indices(0))
    finish(pair.consumer, transfer)
    for handle in (transfer, local, remote):
        pair.consumer.release(handle)
        pair.consumer.release(handle)
    with pytest.raises(InvalidRequest):
        pair.consumer.poll(transfer)
    with pytest.raises(InvalidRequest):
        pair.consumer.telemetry(transfer)
    with pytest.raises(InvalidRequest):
        pair.consumer.post_read(local, indices(0), pair.remote(), indices(0))
    with pytest.raises(InvalidRequest):
        pair.consumer.post_read(pair.local(), indices(0), remote, indices(0))


def test_handles_of_another_fabric_are_refused(pair: Pair) -> None:
    foreign = pair.producer.prepare_local(rows(row(pair.source, 0, 64, 64, 1)))
    with pytest.raises(InvalidRequest):
        pair.consumer.post_read(foreign, indices(0), pair.remote(), indices(0))
    pair.consumer.release(foreign)
    back = pair.producer.add_peer(pair.consumer.metadata())
    theirs = pair.producer.prepare_remote(back, rows(row(pair.target, 0, 64, 64, 1)))
    finish(pair.producer, pair.producer.post_read(foreign, indices(0), theirs, indices(0)))
    assert (pair.source[:64] == GUARD).all()


def test_close_is_idempotent_and_everything_after_it_is_refused(pair: Pair) -> None:
    local, remote = pair.local(), pair.remote()
    transfer = pair.consumer.post_read(local, indices(0), remote, indices(0))
    finish(pair.consumer, transfer)
    consumer, metadata, nearby = pair.consumer, pair.producer.metadata(), rows(row(pair.target, 0, 1, 1, 1))
    consumer.close()
    consumer.close()
    attempts: list[Callable[[], object]] = [
        lambda: consumer.register([region(pair.target)]),
        consumer.metadata,
        lambda: consumer.add_peer(metadata),
        lambda: consumer.remove_peer(pair.peer),
        lambda: consumer.prepare_local(nearby),
        lambda: consumer.prepare_remote(pair.peer, nearby),
        lambda: consumer.post_read(local, indices(0), remote, indices(0)),
        lambda: consumer.poll(transfer),
        lambda: consumer.telemetry(transfer),
        lambda: consumer.notify(pair.peer, b""),
        consumer.take_notifications,
    ]
    for attempt in attempts:
        with pytest.raises(FabricClosed):
            attempt()
    for handle in (transfer, local, remote):
        consumer.release(handle)


def test_reading_from_a_closed_fabric_ends_with_its_bytes_or_with_peer_lost(pair: Pair) -> None:
    """With the bytes where the fabric reads memory past its owner, which closed but did not unmap it (CMA)."""
    local, remote = pair.local(), pair.remote()
    pair.read(local, indices(0), remote, indices(0))
    pair.producer.close()
    try:
        pair.read(local, indices(1), remote, indices(1))
    except PeerLost:
        return
    assert np.array_equal(pair.target[64:128], pair.source[64:128])
