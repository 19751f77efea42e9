"""Features of the real fabric only: idle cost, environment, bindings, foreign agents, telemetry."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.worker.fabric.agent import AgentConfig, apply_ucx_defaults, load_bindings, ucx_defaults
from kvferry.worker.fabric.errors import (
    DescriptorOutOfRange,
    FabricUnavailable,
    InvalidMetadata,
    InvalidRequest,
    PeerLost,
)
from kvferry.worker.fabric.metadata import open_metadata, wrap_metadata
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import MemoryKind, PeerAgent, Region, TransferState
from tests.worker.fabric_harness import arrivals, finish, indices, random_bytes, region, row, rows, until

pytestmark = pytest.mark.slow

IDLE_S = 2.0
MAX_IDLE_CORES = 0.03


@pytest.fixture
def two() -> Iterator[tuple[NixlFabric, NixlFabric]]:
    producer, consumer = NixlFabric("producer"), NixlFabric("consumer")
    yield producer, consumer
    consumer.close()
    producer.close()


def in_a_process(program: str, **environ: str) -> dict[str, Any]:
    """Run a program that prints one JSON line; UCX settings of this process are not inherited."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**inherited, **environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# -- the progress thread -----------------------------------------------------------------------------------------

IDLE = f"""
import json, time, numpy
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.fabric.agent import AgentConfig
from kvferry.worker.fabric.nixl import NixlFabric
memory = numpy.zeros(1 << 20, dtype=numpy.uint8)
fabrics = [NixlFabric(name, AgentConfig(**CONFIG)) for name in ("idle", "peer")]
for fabric in fabrics:
    fabric.register([Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)])
fabrics[0].add_peer(fabrics[1].metadata())
start, cpu = time.monotonic(), time.process_time()
time.sleep({IDLE_S})
print(json.dumps({{"cores": (time.process_time() - cpu) / (time.monotonic() - start)}}))
for fabric in fabrics:
    fabric.close()
"""


@pytest.mark.parametrize("config", [{}, {"num_threads": 2}])
def test_an_idle_process_with_two_agents_takes_next_to_no_cpu(config: dict[str, object]) -> None:
    """Seen: 0.003 cores. With the delay of 0 that NIXL's own Python wrapper sets: 0.47 … 0.79, on two busy cores."""
    assert in_a_process(IDLE.replace("CONFIG", repr(config)))["cores"] < MAX_IDLE_CORES


def test_a_progress_interval_that_would_spin_is_refused() -> None:
    with pytest.raises(FabricUnavailable, match="progress_interval_us is 0"):
        NixlFabric("spinner", AgentConfig(progress_interval_us=0))


def test_without_a_progress_thread_reads_and_notifications_arrive_while_both_sides_are_polled() -> None:
    quiet = AgentConfig(progress_thread=False)
    producer, consumer = NixlFabric("producer", quiet), NixlFabric("consumer", quiet)
    source, target = random_bytes(5, 4096), np.zeros(4096, dtype=np.uint8)
    producer.register([region(source)])
    consumer.register([region(target)])
    peer = consumer.add_peer(producer.metadata())
    consumer.notify(peer, b"hello")
    assert arrivals(producer, 1, sender=consumer) == [("consumer", b"hello")]
    local = consumer.prepare_local(rows(row(target, 0, 4096, 4096, 1)))
    remote = consumer.prepare_remote(peer, rows(row(source, 0, 4096, 4096, 1)))
    transfer = consumer.post_read(local, indices(0), remote, indices(0))

    def done() -> bool:
        assert producer.take_notifications() == []
        return consumer.poll(transfer) is TransferState.DONE

    until(done, "the read is done")
    assert np.array_equal(source, target)
    consumer.close()
    producer.close()


# -- UCX and the environment -------------------------------------------------------------------------------------


SHARED = {"UCX_MM_ERROR_HANDLING": "y", "UCX_KEEPALIVE_INTERVAL": "300s"}
TCP = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, TCP),
        ({"UCX_MM_ERROR_HANDLING": "y"}, {"UCX_KEEPALIVE_INTERVAL": "300s"} | TCP),
        ({"UCX_MM_ERROR_HANDLING": "N"}, TCP),
        ({"UCX_MM_ERROR_HANDLING": "y", "UCX_KEEPALIVE_INTERVAL": "inf"}, TCP),
        ({"UCX_TCP_TX_SEG_SIZE": "8k"}, {"UCX_TCP_RX_SEG_SIZE": "256k"}),
        ({"UCX_TLS": "sm,self", "UCX_MM_ERROR_HANDLING": "n"}, {}),
        ({"UCX_TLS": "sm,self"}, SHARED),
        ({"UCX_TLS": "rc, shm"}, SHARED),
        ({"UCX_TLS": "posix,self"}, SHARED),
        ({"UCX_TLS": "all"}, TCP),
        ({"UCX_TLS": "^tcp"}, SHARED),
        ({"UCX_TLS": "^posix"}, TCP),
        ({"UCX_TLS": "^sm"}, TCP),
        ({"UCX_TLS": "tcp"}, TCP),
        ({"UCX_TLS": "tcp, sm"}, TCP),
        ({"UCX_TLS": "rc,cuda_copy"}, {}),
        ({"UCX_TLS": "^sm,tcp"}, {}),
    ],
)
def test_ucx_defaults_fill_in_only_what_is_open_and_used(environ: dict[str, str], chosen: dict[str, str]) -> None:
    before = dict(environ)
    assert ucx_defaults(environ) == chosen
    assert environ == before


def test_applied_defaults_are_set_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"UCX_LOG_LEVEL": "warn", "UCX_TLS": "sm,self"}
    with caplog.at_level(logging.INFO, "kvferry.worker.fabric.agent"):
        apply_ucx_defaults(environ)
        apply_ucx_defaults(environ)
    assert environ == {"UCX_LOG_LEVEL": "warn", "UCX_TLS": "sm,self", **SHARED}
    assert [record.getMessage() for record in caplog.records] == [
        "set UCX_MM_ERROR_HANDLING=y, which the environment left open",
        "set UCX_KEEPALIVE_INTERVAL=300s, which the environment left open",
    ]


MAKE = """
import json, os
from kvferry.worker.fabric.errors import FabricUnavailable
from kvferry.worker.fabric.nixl import NixlFabric
try:
    NixlFabric("agent").close()
    made = True
except FabricUnavailable:
    made = False
print()
print(json.dumps({"made": made, "setting": os.environ.get("UCX_MM_ERROR_HANDLING")}))
"""


def test_the_default_reaches_ucx_before_the_agent_is_made() -> None:
    """Over shared memory alone UCX cannot make an agent without the setting (seen: no active messages transport)."""
    assert in_a_process(MAKE, UCX_TLS="sm,self") == {"made": True, "setting": "y"}


def test_what_the_user_set_is_left_alone() -> None:
    refused = in_a_process(MAKE, UCX_TLS="sm,self", UCX_MM_ERROR_HANDLING="n")
    assert refused == {"made": False, "setting": "n"}


@pytest.mark.parametrize("transports", ["all", "tcp", "sm,self", "^tcp"])
def test_ucx_takes_the_defaults_without_a_warning(transports: str) -> None:
    """It warns of values that it cannot read, and of settings that nothing uses."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", MAKE],
        env={**inherited, "UCX_TLS": transports},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout.splitlines()[-1])["made"], done.stderr
    assert "UCX" not in done.stdout + done.stderr


# -- making an agent ---------------------------------------------------------------------------------------------

BINDINGS = """
import json, sys
sys.modules["BLOCKED"] = None
from kvferry.worker.fabric.agent import load_bindings
print(json.dumps({"bindings": load_bindings().__name__}))
"""


@pytest.mark.parametrize(("blocked", "found"), [("nixl_cu12", "nixl_cu13"), ("nixl_cu13", "nixl_cu12")])
def test_one_variant_of_the_bindings_is_enough(blocked: str, found: str) -> None:
    assert in_a_process(BINDINGS.replace("BLOCKED", blocked))["bindings"] == f"{found}._bindings"


def test_without_nixl_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    with pytest.raises(FabricUnavailable, match="the Python package nixl is not usable"):
        load_bindings()


def test_a_backend_that_is_not_installed_is_named() -> None:
    with pytest.raises(FabricUnavailable, match="no backend \\['PIGEON'\\]"):
        NixlFabric("agent", AgentConfig(backends=("UCX", "PIGEON")))


@pytest.mark.parametrize("name", ["", "x" * 256, "nul\0nul", "\udcff"])
def test_an_agent_name_that_cannot_travel_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        NixlFabric(name)


def test_a_refused_region_leaves_none_of_its_batch_registered(two: tuple[NixlFabric, NixlFabric]) -> None:
    """UCX refuses host memory that is called VRAM, with and without a GPU."""
    memory = random_bytes(3, 4096)
    address = memory.ctypes.data
    with pytest.raises(FabricUnavailable, match="2 regions were refused"):
        two[0].register([region(memory), Region(address, 4096, MemoryKind.VRAM)])
    with pytest.raises(DescriptorOutOfRange):
        two[0].prepare_local(rows(row(memory, 0, 64, 64, 1)))


# -- foreign agents ----------------------------------------------------------------------------------------------


def test_a_sender_whose_name_is_not_text_does_not_stop_notifications(
    two: tuple[NixlFabric, NixlFabric], caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = two
    bindings = load_bindings()
    foreign = bindings.nixlAgent(b"\xff\xfe", _event_driven(bindings))
    foreign.createBackend("UCX", {})
    foreign.loadRemoteMD(open_metadata(producer.metadata())[1])
    peer = consumer.add_peer(producer.metadata())
    for lost in (1, 2):
        foreign.genNotif("producer", b"gibberish")

        def noticed(lost: int = lost) -> bool:
            assert producer.take_notifications() == []
            return producer._undecodable == lost

        until(noticed, "the foreign notification was noticed")
    consumer.notify(peer, b"done")
    assert arrivals(producer, 1) == [("consumer", b"done")]
    assert len([record for record in caplog.records if "lost notifications" in record.getMessage()]) == 1


def test_a_foreign_agent_with_a_proper_name_is_reported_as_the_sender(two: tuple[NixlFabric, NixlFabric]) -> None:
    producer, _ = two
    bindings = load_bindings()
    foreign = bindings.nixlAgent("other", _event_driven(bindings))
    foreign.createBackend("UCX", {})
    foreign.loadRemoteMD(open_metadata(producer.metadata())[1])
    foreign.genNotif("producer", b"\x00\xff" * 3)
    assert arrivals(producer, 1) == [("other", b"\x00\xff" * 3)]


def test_a_peer_that_nixl_forgot_by_itself_is_lost(two: tuple[NixlFabric, NixlFabric]) -> None:
    """NIXL drops a peer when one of its transfers notices the death; the others then get NOT_FOUND."""
    producer, consumer = two
    memory = random_bytes(9, 4096)
    producer.register([region(memory)])
    consumer.register([region(memory)])
    one = rows(row(memory, 0, 64, 64, 1))

    def post(peer: PeerAgent) -> None:
        consumer.post_read(consumer.prepare_local(one), indices(0), remote, indices(0))

    def notify(peer: PeerAgent) -> None:
        consumer.notify(peer, b"hello")

    for attempt in (post, notify):
        peer = consumer.add_peer(producer.metadata())
        remote = consumer.prepare_remote(peer, one)
        consumer._agent.invalidateRemoteMD("producer")
        with pytest.raises(PeerLost, match="NOT_FOUND"):
            attempt(peer)
        with pytest.raises(PeerLost, match="known to be dead"):
            attempt(peer)
        consumer.remove_peer(peer)


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
    two: tuple[NixlFabric, NixlFabric], name: str, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    """The checksum is right here. NIXL keeps half of what it refused, which could make a successor fail."""
    producer, consumer = two
    with pytest.raises(InvalidMetadata, match=reason):
        consumer.add_peer(wrap_metadata(name, spoil(open_metadata(producer.metadata())[1])))
    with contextlib.closing(NixlFabric("producer")) as successor:
        consumer.notify(consumer.add_peer(successor.metadata()), b"hello")
        assert arrivals(successor, 1) == [("consumer", b"hello")]


MEET_AGAIN = """
import json, os, numpy
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind, Region, TransferState
from kvferry.worker.fabric.nixl import NixlFabric

memory = numpy.zeros(64, dtype=numpy.uint8)
producer, consumer = NixlFabric("producer"), NixlFabric("consumer")
for fabric in (producer, consumer):
    fabric.register([Region(memory.ctypes.data, memory.nbytes, MemoryKind.DRAM)])
one = DescriptorRows.of(MemoryKind.DRAM, [(memory.ctypes.data, 64, 0, 64, 1)])
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
print(json.dumps({"before": before, "after": kept()}))
"""


@pytest.mark.parametrize("in_shared_memory", ["y", "n"])
def test_a_living_peer_that_is_added_again_and_again_adds_neither_connections_nor_segments(
    in_shared_memory: str,
) -> None:
    found = in_a_process(MEET_AGAIN, UCX_MM_ERROR_HANDLING=in_shared_memory)
    assert all(after - before < 8 for before, after in zip(found["before"], found["after"], strict=True)), found


def _event_driven(bindings: Any) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, 20_000
    return config


# -- telemetry ---------------------------------------------------------------------------------------------------


def test_telemetry_counts_bytes_and_merged_descriptors_and_times_the_transfer() -> None:
    producer, consumer = NixlFabric("producer"), NixlFabric("consumer")
    source, target = random_bytes(6, 16 << 20), np.zeros(16 << 20, dtype=np.uint8)
    producer.register([region(source)])
    consumer.register([region(target)])
    peer = consumer.add_peer(producer.metadata())
    local = consumer.prepare_local(rows(row(target, 0, 4096, 4096, 4096)))
    remote = consumer.prepare_remote(peer, rows(row(source, 0, 4096, 4096, 4096)))
    ascending = np.arange(4096, dtype=np.int32)
    seen = {}
    for name, order in (("merged", ascending), ("scattered", ascending[::-1].copy())):
        transfer = consumer.post_read(local, order, remote, order)
        finish(consumer, transfer)
        reported = consumer.telemetry(transfer)
        assert reported is not None
        seen[name] = reported
        assert reported.bytes == 16 << 20
        # 16 MiB take more than a tenth of a millisecond on any machine, and this took less than a minute.
        assert 100 < reported.transfer_us < 60e6
        assert 0 < reported.post_us <= reported.transfer_us
    assert seen["scattered"].descriptors == 4096
    assert seen["merged"].descriptors < 4096
    consumer.close()
    producer.close()


def test_without_capture_there_is_no_telemetry() -> None:
    fabric, peer_fabric = NixlFabric("consumer", AgentConfig(capture_telemetry=False)), NixlFabric("producer")
    source, target = random_bytes(6, 64), np.zeros(64, dtype=np.uint8)
    peer_fabric.register([region(source)])
    fabric.register([region(target)])
    peer = fabric.add_peer(peer_fabric.metadata())
    local = fabric.prepare_local(rows(row(target, 0, 64, 64, 1)))
    transfer = fabric.post_read(
        local, indices(0), fabric.prepare_remote(peer, rows(row(source, 0, 64, 64, 1))), indices(0)
    )
    finish(fabric, transfer)
    assert np.array_equal(source, target)
    assert fabric.telemetry(transfer) is None
    fabric.close()
    peer_fabric.close()
