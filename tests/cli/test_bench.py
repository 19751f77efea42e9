"""`kvferry bench`: real processes that read over NIXL, and a listener that no input ends."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.cli.bench import side_channel
from kvferry.cli.bench.command import print_measured
from kvferry.cli.bench.side_channel import (
    MAX_VISIT_BYTES,
    BenchClient,
    BenchListener,
    Reply,
    Status,
)
from kvferry.cli.transfer.child import Child
from kvferry.cli.transfer.messages import (
    CaseResult,
    Measured,
    Offer,
    ReadsFailed,
    Task,
)
from kvferry.cli.transfer.process import (
    RUN_BYTES,
    Reader,
    RegisteredMemory,
    make_offer,
)
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.secrets import VARIABLE, Secrets
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.handshake import Hello, Refused
from kvferry.protocol.handshake import encode as encode_channel
from kvferry.worker.fabric.port import (
    Indices,
    LocalDescriptors,
    RemoteDescriptors,
    Transfer,
)
from tests.cli.command import refused, run
from tests.cli.owners import OFFER, READS, TAME, scripted
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.link.channel import HOST, client, free_port
from tests.link.secret_files import NEW, OLD, OTHER, listing, write
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

QUICK = ("--seconds", "0.02", "--timeout", "60", "--device", "cpu")
BENCH = (sys.executable, "-m", "kvferry", "bench")
TIMEOUT_S = 10.0
SESSION = "ab" * 16
LOCAL = AllowedHosts.from_entries(["127.0.0.0/8"])


@contextlib.contextmanager
def listener_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A listener that is ready, and its address."""
    address = f"{HOST}:{free_port()}"
    command = [*BENCH, "--listen", address, "--device", "cpu", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as listening:
        assert listening.stderr is not None
        try:
            line = listening.stderr.readline()
            assert line == f"listening on {address} without a secret, with DRAM\n"
            yield listening, address
        finally:
            listening.send_signal(signal.SIGCONT)
            listening.terminate()


@dataclass
class Served:
    """A listener on a thread of the test.

    Attributes:
        said: its lines.
        ended: its exit status, or its error, once it has ended.
    """

    listener: BenchListener
    port: int
    said: list[str] = field(default_factory=list)
    ended: list[Status | KvferryError] = field(default_factory=list)

    def client(self, known: Secrets = ()) -> BenchClient:
        return BenchClient(HOST, self.port, TIMEOUT_S, known)

    def visit(self, status: Status | None = None, known: Secrets = ()) -> Offer:
        """Visit as a new client, as soon as the listener is ready."""
        return self.client(known).visit(TIMEOUT_S, status)

    def ask(self, frame: bytes) -> Reply:
        with client(self.port, zmq.REQ) as asking:
            asking.send(frame)
            reply: Reply = msgspec.msgpack.decode(asking.recv(), type=Reply)
            return reply

    def serve(self) -> None:
        try:
            self.ended.append(self.listener.serve())
        except KvferryError as error:
            self.ended.append(error)
        except KeyboardInterrupt:
            pass


@contextlib.contextmanager
def listening(
    command: tuple[str, ...] = TAME,
    known: Secrets = (),
    allowed: AllowedHosts = LOCAL,
) -> Iterator[Served]:
    """A listener that serves until its client has ended, or until the end of the block."""
    port = free_port()
    said: list[str] = []
    with contextlib.closing(Child(command)) as owner:
        owner.send(Task(device="cpu", max_bytes=64 << 10))
        listener = BenchListener(HOST, port, owner, known, allowed, said.append)
        served = Served(listener, port, said)
        thread = threading.Thread(target=served.serve, name="kvferry-bench-listener")
        thread.start()
        try:
            yield served
        finally:
            listener.stop()
            thread.join()
            listener.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with listening() as serving:
        wait_until(lambda: serving.said, "its memory is ready")
        yield serving


def test_two_processes_read_every_size_and_every_byte_is_right() -> None:
    with listener_process("--max-size", "1M") as (process, address):
        ran = run("bench", "--connect", address, "--max-size", "64K", "--json", *QUICK)
        assert (ran.code, ran.err) == (0, "")
        found: dict[str, Any] = json.loads(ran.out)
        assert process.wait(timeout=30) == 0
    assert list(found) == [
        "kvferry_bench",
        "right",
        "listener",
        "transports",
        "first_contact_ms",
        "reads",
    ]
    assert found["right"] is True
    assert found["listener"] == socket.gethostname()
    assert found["transports"]
    assert found["first_contact_ms"] > 0
    sizes = [
        (reads["num_bytes"] >> 10, reads["descriptors"]) for reads in found["reads"]
    ]
    assert sizes == [(4, 1), (16, 1), (64, 1), (64, 4)]
    assert len({reads["p50_us"] for reads in found["reads"]}) == 4
    for reads in found["reads"]:
        assert (reads["wrong"], reads["first_wrong"]) == (0, -1)
        assert reads["reads"] >= 5
        assert 0 < reads["p50_us"] <= reads["p99_us"]
        gb_s = reads["num_bytes"] / reads["p50_us"] / 1e3
        assert reads["gb_s"] == pytest.approx(gb_s)


def measured(
    fabric: MemoryFabric, network: MemoryNetwork, changed: int | None = None
) -> dict[tuple[int, int], CaseResult]:
    """Reads over a fabric by KiB and descriptors. One byte of what is read may have been changed."""
    owner = MemoryFabric("owner", network)
    theirs = RegisteredMemory(owner, "cpu", 272 << 10)
    offer = make_offer(owner, theirs)
    if changed is not None:
        theirs.read(theirs.length)[changed] ^= 1
    mine = RegisteredMemory(fabric, "cpu", 1 << 20)
    task = Task(device="cpu", max_bytes=mine.length, seconds=0.0, timeout_s=1.0)
    found = Reader(fabric, mine, task, lambda _: None).measure(offer)
    return {(each.num_bytes >> 10, each.descriptors): each for each in found.reads}


def test_every_size_is_read_and_a_changed_byte_found_wherever_it_is_read() -> None:
    """Of memory that is no multiple of the larger sizes, and smaller than this end's."""
    network = MemoryNetwork()
    fabric = MemoryFabric("reader", network)
    found = measured(fabric, network, changed=9000)
    assert list(found) == [(4, 1), (16, 1), (64, 1), (64, 4), (256, 1), (256, 16)]
    for size, reads in found.items():
        assert reads.checked == (reads.reads + 3) * reads.num_bytes
        if size == (4, 1):
            assert (reads.wrong, reads.first_wrong) == (0, -1)
        elif reads.descriptors == 1:
            assert (reads.wrong, reads.first_wrong) == (reads.reads + 3, 9000)
        else:
            # Its run may not be among those of this case.
            assert reads.wrong in (0, reads.reads + 3)
    assert found[256, 16].first_wrong % RUN_BYTES == 9000


def test_a_read_that_brings_nothing_does_not_pass_for_the_one_before() -> None:
    class Losing(MemoryFabric):
        posted = 0

        def post_read(
            self,
            local: LocalDescriptors,
            local_indices: Indices,
            remote: RemoteDescriptors,
            remote_indices: Indices,
        ) -> Transfer:
            self.posted += 1
            num = len(local_indices) * (self.posted % 2)
            return super().post_read(
                local, local_indices[:num], remote, remote_indices[:num]
            )

    network = MemoryNetwork()
    for reads in measured(Losing("reader", network), network).values():
        assert reads.wrong == (reads.reads + 3) // 2 * reads.num_bytes


def test_wrong_bytes_give_exit_status_1_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = msgspec.structs.replace(READS, wrong=3)
    found = Measured(listener="p0", first_contact_ms=1.0, reads=(READS, wrong))
    monkeypatch.setattr(side_channel, "measure", lambda *_: found)
    with listening() as served:
        ran = run("bench", "--connect", f"{HOST}:{served.port}", "--json", *QUICK)
        wait_until(lambda: served.ended, "the listener ended")
    assert (ran.code, json.loads(ran.out)["right"], served.ended) == (1, False, [1])
    assert served.said[-1].endswith(" is gone: bytes were WRONG")


def test_a_listener_that_freezes_is_reported_within_the_deadline_with_a_hint() -> None:
    """During the measurements: without an answer of the listener the client gives up, even if reads succeed."""
    with listener_process("--max-size", "16M") as (process, address):
        command = [*BENCH, "--connect", address, "--device", "cpu"]
        command += ["--seconds", "300", "--timeout", "2"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as reading:
            assert process.stderr is not None
            assert process.stderr.readline().endswith(" reads\n")
            process.send_signal(signal.SIGSTOP)
            try:
                out, err = reading.communicate(timeout=120)
            finally:
                reading.kill()
        assert (reading.returncode, out, err.count("\n")) == (2, "", 1)
        assert "did not answer within 2 s" in err
        for word in ("port", "firewall", "UCX_NET_DEVICES", "`kvferry doctor`"):
            assert word in err


def test_a_listener_that_is_interrupted_ends_with_its_owner() -> None:
    with listener_process() as (process, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert not any(Path(f"/proc/{pid}").exists() for pid in children.split())


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ("sys.exit('no NIXL today')", "ended with status 1: no NIXL today; see"),
        ("send(pipe, OFFER); os.abort()", "ended with signal 6; see"),
        ("signal.pause()", "hangs at its start; see `kvferry doctor`"),
    ],
)
def test_without_memory_the_listener_ends_and_says_why(
    owner: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "START_S", 2.0)
    with listening(scripted(owner)) as served:
        wait_until(lambda: served.ended, "it ended")
    (ended,) = served.ended
    assert isinstance(ended, ReadsFailed)
    assert said in str(ended)


HANGS = "send(pipe, CaseProgress(what='x')); signal.pause()"


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        ("os.abort()", "its NIXL process ended with signal 6; check the port"),
        (HANGS, "NIXL hangs: no result for 0 s; check the port"),
    ],
    ids=["dies", "hangs"],
)
def test_a_reader_whose_nixl_dies_or_hangs_is_reported_at_both_ends(
    reader: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of metadata that crashes NIXL, or a fabric that does not work."""
    monkeypatch.setattr("kvferry.cli.transfer.child._GRACE_S", 0.1)
    task = Task(device="cpu", max_bytes=4096, timeout_s=0.1)
    with listening() as served:
        with pytest.raises(ReadsFailed, match=said):
            served.client().run(task, lambda _: None, scripted(reader))
        wait_until(lambda: served.ended == [2], "it ended")
    assert served.said[-1].endswith(" is gone: it gave up")


def test_a_missing_gpu_that_was_requested_is_reported_in_one_line() -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    said = refused("bench", "--listen", f"{HOST}:{free_port()}", "--device", "cuda")
    assert "no GPU memory here" in said
    assert "--device cpu" in said


def test_a_missing_listener_is_reported_in_one_line_with_a_hint() -> None:
    said = refused("bench", "--connect", f"{HOST}:{free_port()}", "--timeout", "0.2")
    for word in ("did not answer within 0.2 s", "--listen", "kvferry doctor"):
        assert word in said


def test_the_table_distinguishes_wrong_and_right_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    wrong = msgspec.structs.replace(
        READS, wrong=3, first_wrong=17, kind="VRAM", p50_us=655.36, num_bytes=1 << 20
    )
    print_measured(
        Measured(
            listener="p0", transports="rc", first_contact_ms=1.0, reads=(READS, wrong)
        )
    )
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "host 64 KiB 4 9 2 32.8 123 right" in rows
    assert "GPU 1 MiB 4 9 2 655 123 3 of 786432 WRONG, the first at 17" in rows
    assert "3 of 1572864 bytes are WRONG: do not run engines over this" in rows
    assert "listener p0, over rc" in rows


VISIT = {"type": "bench visit", "version": 2, "session": SESSION, "host": "x"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "message"),
        (b"GET / HTTP/1.1\r\n", "message"),
        (b"\x91" * MAX_VISIT_BYTES, "message"),
        ({"type": "bench steal"}, "type"),
        ({**VISIT, "session": "../../etc/passwd"}, "session"),
        ({**VISIT, "host": "a\nb"}, "host"),
        ({**VISIT, "version": 1}, "version"),
        ({**VISIT, "version": 2**63}, "version"),
        ({**VISIT, "status": 3}, "status"),
        (encode_channel(Hello(engine_id="prefill-0", client_id="x")), "type"),
    ],
    ids=range(10),
)
def test_an_invalid_frame_is_refused_by_its_field_and_ends_nothing(
    served: Served, body: bytes | dict[str, object], field: str
) -> None:
    if isinstance(body, dict):
        body = msgspec.msgpack.encode(body)
    reply = served.ask(body)
    assert isinstance(reply, Refused)
    assert reply.field == field
    assert served.ended == []


def test_too_many_or_too_long_frames_and_bytes_that_are_not_zmq_end_nothing(
    served: Served,
) -> None:
    visit = msgspec.msgpack.encode(VISIT)
    before = served.listener.counters.total("bad_frames")
    with client(served.port) as dealer:
        dealer.send_multipart([b"", b"x", b"y"])
        dealer.send_multipart([b"not empty", visit])
        dealer.send_multipart([b""] * 1000)
        dealer.send_multipart([b"", b"x" * (MAX_VISIT_BYTES + 1)])
    with socket.create_connection((HOST, served.port)) as plain:
        plain.sendall(secrets.token_bytes(10_000))
    wait_until(
        lambda: served.listener.counters.total("bad_frames") >= before + 3,
        "the frames were counted",
    )
    assert isinstance(
        served.ask(msgspec.msgpack.encode({**VISIT, "version": 1})), Refused
    )
    assert served.ended == []


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_listener_ends_with_its_clients_status_and_another_has_no_say(
    status: Status,
) -> None:
    with listening() as served:
        reading = served.client()
        assert reading.visit(TIMEOUT_S) == OFFER
        with pytest.raises(ReadsFailed, match=r"client is another one; expected none"):
            served.visit(status)
        assert reading.visit(TIMEOUT_S) == OFFER
        assert served.ended == []
        reading.visit(TIMEOUT_S, status)
        wait_until(lambda: served.ended == [status], "it ended")


def test_a_silent_client_ends_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "SILENT_S", 0.1)
    with listening() as served:
        served.visit()
        wait_until(lambda: served.ended == [2], "it ended")
    assert "no message for" in served.said[-1]


def test_without_a_secret_only_clients_on_allowed_hosts_may_read() -> None:
    """Unless others are listed, those of the listener's own host: `AllowedHosts.without_list`."""
    others = AllowedHosts.from_entries(["10.0.0.0/8"])
    with listening(allowed=others) as served:
        with pytest.raises(ReadsFailed) as refusal:
            served.visit()
        for word in (f"client is {HOST}", VARIABLE, "--allowed-hosts"):
            assert word in str(refusal.value)
        assert not any("reads" in line for line in served.said)
    port = free_port()
    said = refused("bench", "--listen", f"{HOST}:{port}", "--allowed-hosts", "10.1/8")
    assert "--allowed-hosts is '10.1/8'; expected addresses, networks" in said


def test_only_clients_with_the_secret_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(known=(NEW,)) as served:
        address = f"{HOST}:{served.port}"
        monkeypatch.delenv(VARIABLE, raising=False)
        assert "and there is none here" in refused("bench", "--connect", address)
        monkeypatch.setenv(VARIABLE, write(tmp_path / "other", listing(OTHER)))
        said = refused("bench", "--connect", address)
        assert "it has none of the secrets listed here" in said
        assert served.visit(known=(OLD, NEW)) == OFFER
