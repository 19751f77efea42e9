"""Features of the real fabric only: foreign agents, reconnections, peers that are kept for later, telemetry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import numpy as np
import pytest

from kvferry.worker.fabric import nixl as nixl_fabric
from kvferry.worker.fabric.errors import (
    DescriptorOutOfRange,
    FabricUnavailable,
    InvalidMetadata,
    PeerLost,
)
from kvferry.worker.fabric.metadata_envelope import open_metadata, wrap_metadata
from kvferry.worker.fabric.nixl import (
    MAX_RETAINED_PEERS,
    AgentConfig,
    NixlFabric,
    NixlPeers,
    load_bindings,
)
from kvferry.worker.fabric.port import MemoryKind, PeerAgent, Region
from kvferry.worker.peers.registry import PeerRegistry
from tests.waiting import wait_until
from tests.worker.fabric.harness import (
    NixlHarness,
    arrivals,
    finish,
    indices,
    random_bytes,
    region,
    row,
    rows,
)
from tests.worker.fabric.scenes import AgentPair
from tests.worker.fabric.test_nixl_agent import answer_of

pytestmark = pytest.mark.slow


class ConfiguredHarness(NixlHarness):
    """Agents with a configuration of their own."""

    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        self._config = config

    def _make(self, name: str) -> NixlFabric:
        return NixlFabric(name, self._config)


@contextlib.contextmanager
def pair_with(config: AgentConfig, size: int = 1 << 16) -> Iterator[AgentPair]:
    with contextlib.closing(ConfiguredHarness(config)) as harness:
        yield AgentPair(harness, size)


@pytest.fixture
def nixl() -> Iterator[AgentPair]:
    """A producer and a consumer that know each other."""
    with pair_with(AgentConfig()) as pair:
        yield pair


def test_a_refused_region_leaves_none_of_its_batch_registered(nixl: AgentPair) -> None:
    """UCX refuses host memory that is called VRAM, with and without a GPU."""
    memory = random_bytes(3, 4096)
    with pytest.raises(FabricUnavailable, match="2 regions were refused"):
        nixl.producer.register(
            [region(memory), Region(memory.ctypes.data, 4096, MemoryKind.VRAM)]
        )
    with pytest.raises(DescriptorOutOfRange):
        nixl.producer.prepare_local(rows(row(memory, 0, 64, 64, 1)))


def foreign_agent(name: str | bytes, peer: NixlFabric) -> Any:
    """An agent that is not kvferry's, and knows the peer."""
    bindings = load_bindings()
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, 20_000
    agent = bindings.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    agent.loadRemoteMD(open_metadata(peer.metadata())[1])
    return agent


def test_a_sender_whose_name_is_not_text_does_not_stop_notifications(
    nixl: AgentPair, caplog: pytest.LogCaptureFixture
) -> None:
    producer = nixl.producer
    assert isinstance(producer, NixlFabric)
    foreign = foreign_agent(b"\xff\xfe", producer)
    for lost in (1, 2):
        foreign.genNotif("producer", b"gibberish")

        def noticed(lost: int = lost) -> bool:
            assert producer.take_notifications() == []
            return producer.undecodable == lost

        wait_until(noticed, "the foreign notification was noticed")
    nixl.consumer.notify(nixl.peer, b"done")
    assert arrivals(producer, 1) == [("consumer", b"done")]
    assert (
        len(
            [
                record
                for record in caplog.records
                if "lost notifications" in record.getMessage()
            ]
        )
        == 1
    )


def test_a_peer_that_nixl_forgot_by_itself_is_lost(nixl: AgentPair) -> None:
    """NIXL drops a peer when one of its transfers notices the death; the others then get NOT_FOUND."""
    consumer = nixl.consumer
    assert isinstance(consumer, NixlFabric)

    def post(_: PeerAgent) -> None:
        consumer.post_read(nixl.local(), indices(0), remote, indices(0))

    def notify(peer: PeerAgent) -> None:
        consumer.notify(peer, b"hello")

    for attempt in (post, notify):
        remote = nixl.remote()
        consumer._agent.invalidateRemoteMD("producer")
        for said in ("NOT_FOUND", "known to be dead"):
            with pytest.raises(PeerLost, match=said):
                attempt(nixl.peer)
        consumer.remove_peer(nixl.peer)
        nixl.peer = consumer.add_peer(nixl.producer.metadata())


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("other", lambda body: body, "differ in name"),
        ("producer", lambda body: b"nonsense", "NIXL refused it"),
        ("producer", lambda body: body[: body.index(b"MemSection")], "NIXL refused it"),
    ],
    ids=["another name inside", "nonsense inside", "no regions inside"],
)
def test_an_envelope_around_something_else_is_refused_and_leaves_no_trace(
    name: str, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    """The checksum is right here. NIXL keeps half of what it refused, which could make a successor fail."""
    with contextlib.closing(NixlHarness()) as harness:
        producer, consumer = harness.fabric("producer"), harness.fabric("consumer")
        with pytest.raises(InvalidMetadata, match=reason):
            consumer.add_peer(
                wrap_metadata(name, spoil(open_metadata(producer.metadata())[1]))
            )
        successor = harness.fabric("producer")
        consumer.notify(consumer.add_peer(successor.metadata()), b"hello")
        assert arrivals(successor, 1) == [("consumer", b"hello")]


CONNECT_AGAIN = """
import json, os, numpy
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region, TransferState
from kvferry.worker.fabric.nixl import NixlFabric

memory = numpy.zeros(64, dtype=numpy.uint8)
producer, consumer = NixlFabric("producer"), NixlFabric("consumer")
for fabric in (producer, consumer):
    fabric.register([Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)])
one = DescriptorRows.from_tuples(MemoryKind.DRAM, [(memory.ctypes.data, 64, 0, 64, 1)])
index = numpy.zeros(1, dtype=numpy.int32)

def connect():
    peer = consumer.add_peer(producer.metadata())
    local, remote = consumer.prepare_local(one), consumer.prepare_remote(peer, one)
    read = consumer.post_read(local, index, remote, index)
    while consumer.poll(read) is TransferState.IN_FLIGHT:
        pass
    for handle in (read, local, remote):
        consumer.release(handle)
    consumer.remove_peer(peer)

def kept():
    files = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    sockets = sum(os.path.islink(file) and os.readlink(file).startswith("socket") for file in files)
    return sockets, sum(line.split()[1].endswith("s") for line in open("/proc/self/maps"))

for _ in range(4):
    connect()
before = kept()
for _ in range(16):
    connect()
print(json.dumps([before, kept()]))
"""


@pytest.mark.parametrize("in_shared_memory", ["y", "n"])
def test_a_living_peer_that_is_added_again_and_again_adds_neither_connections_nor_segments(
    in_shared_memory: str,
) -> None:
    before, after = answer_of(CONNECT_AGAIN, UCX_MM_ERROR_HANDLING=in_shared_memory)
    assert all(now - then < 8 for then, now in zip(before, after, strict=True)), (
        before,
        after,
    )


def test_telemetry_counts_bytes_and_merged_descriptors_and_times_the_transfer() -> None:
    ascending = np.arange(4096, dtype=np.int32)
    with pair_with(AgentConfig(), 16 << 20) as large:
        pages = {"length": 4096, "stride": 4096, "count": 4096}
        local, remote = large.local(**pages), large.remote(**pages)
        seen = {}
        for name, order in (
            ("merged", ascending),
            ("scattered", ascending[::-1].copy()),
        ):
            transfer = large.consumer.post_read(local, order, remote, order)
            finish(large.consumer, transfer)
            reported = large.consumer.telemetry(transfer)
            assert reported is not None
            seen[name] = reported
            assert reported.bytes == 16 << 20
            # 16 MiB take more than a tenth of a millisecond on any machine, and this took less than a minute.
            assert 100 < reported.transfer_us < 60e6
            assert 0 < reported.post_us <= reported.transfer_us
    assert seen["scattered"].descriptors == 4096
    assert seen["merged"].descriptors < 4096


A, B, C = (PeerAgent(name) for name in "abc")


class KeptHandles:
    """The handles that NIXL is given, and those that it is to forget."""

    def __init__(self, max_retained: int = 8) -> None:
        self.calls: list[str] = []
        load, forget = (
            (lambda name, _: self.calls.append(f"+{name}")),
            (lambda name: self.calls.append(f"-{name}")),
        )
        self.peers = NixlPeers(load, forget, max_retained)

    def part(self, name: PeerAgent, metadata: bytes = b"1") -> None:
        self.peers.add(name, metadata)
        self.peers.remove(name)


def test_a_peer_that_comes_back_is_not_loaded_again_and_never_forgotten_meanwhile() -> (
    None
):
    scene = KeptHandles()
    scene.part(A)
    scene.peers.add(A, b"1")
    with pytest.raises(InvalidMetadata, match="known already"):
        scene.peers.add(A, b"1")
    assert scene.calls == ["+a"]


def test_one_with_other_metadata_is_forgotten_first() -> None:
    scene = KeptHandles()
    scene.part(A)
    scene.peers.add(A, b"2")
    assert scene.calls == ["+a", "-a", "+a"]


def test_of_too_many_the_one_that_was_left_first_is_forgotten_and_in_the_end_all() -> (
    None
):
    scene = KeptHandles(max_retained=2)
    for name in (A, B, C):
        scene.part(name)
    assert scene.calls == ["+a", "+b", "+c", "-a"]
    scene.peers.clear()
    assert scene.calls[4:] == ["-b", "-c"]


def test_a_rotation_of_as_many_living_peers_as_a_worker_knows_leaves_no_connection() -> (
    None
):
    """Each one that is forgotten while it lives leaves a file open. Beyond 256 a rotation leaked one a contact."""
    scene = KeptHandles(MAX_RETAINED_PEERS)
    max_peers = signature(PeerRegistry).parameters["max_peers"].default
    for _ in range(3):
        for number in range(max_peers):
            scene.part(PeerAgent(f"peer-{number}"))
    assert len(scene.calls) == max_peers


def test_no_new_peer_is_added_when_most_files_are_open_and_known_ones_are_used_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = KeptHandles()
    scene.part(A)
    monkeypatch.setattr(nixl_fabric, "MAX_OPEN_FILES_FRACTION", 0.0)
    with pytest.raises(FabricUnavailable, match="files of this process are open"):
        scene.peers.add(B, b"1")
    scene.peers.add(A, b"1")
    assert scene.calls == ["+a"]
    monkeypatch.undo()
    scene.peers.add(B, b"1")
    assert scene.calls == ["+a", "+b"]


def test_one_whose_requests_failed_is_forgotten_at_once() -> None:
    scene = KeptHandles()
    scene.peers.add(A, b"1")
    scene.peers.get("test", A).is_sound = False
    scene.peers.remove(A)
    assert scene.calls == ["+a", "-a"]
