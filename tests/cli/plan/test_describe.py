"""`kvferry describe` against a real listener."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.cli.plan.short_engine import engine_of_form
from kvferry.link.counters import Counters
from kvferry.link.secrets import VARIABLE
from kvferry.link.server import SideChannelListener
from kvferry.protocol.description_json import (
    decode_engine_json,
    from_engine_json,
    to_engine_json,
)
from kvferry.protocol.handshake import EngineDescription
from tests.cli.command import refused, run
from tests.cli.plan.forms import read_form
from tests.link.channel import HOST, free_port, listening
from tests.link.secret_files import NEW, OLD, listing, write
from tests.protocol.samples import KEY

FORM = "layers=6,heads=8,dim=16,tp=2,pp=2,window=64@0-4/2"


def engine(**changes: object) -> EngineDescription:
    described = from_engine_json(engine_of_form(read_form(FORM), "prefill-0"))
    return msgspec.structs.replace(described, mac_key=KEY, boot="ab" * 16, **changes)


@contextlib.contextmanager
def published(
    description: EngineDescription, counters: Counters | None = None
) -> Iterator[str]:
    with listening(counters) as (listener, port):
        listener.publish(description)
        yield f"{HOST}:{port}"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "JSON"])
def test_the_names_of_an_engine_reorder_nothing_on_a_terminal(form: list[str]) -> None:
    named = msgspec.structs.replace(engine(), engine_id="e\u202edeliaf\u2066\u200b")
    with published(named) as address:
        ran = run("describe", address, *form)
    assert ran.code == 0, ran.err
    assert ran.out.replace("\n", "").isprintable()
    assert "\\u202e" in ran.out
    if form:
        assert decode_engine_json(ran.out.encode()) == to_engine_json(named)


def test_the_description_json_of_a_running_engine_is_the_published_one() -> None:
    counters = Counters()
    with published(engine(), counters) as address:
        ran = run("describe", address, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert decode_engine_json(ran.out.encode()) == to_engine_json(engine())
    assert counters.total("handshakes_served") == 1
    assert counters.total("bad_frames") == 0


def test_an_engine_with_a_secret_is_described_to_askers_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    listener = SideChannelListener(HOST, port, Counters(), (NEW,))
    try:
        listener.publish(engine())
        monkeypatch.setenv(VARIABLE, write(tmp_path / "secrets", listing(OLD, NEW)))
        ran = run("describe", f"{HOST}:{port}", "--json")
        assert decode_engine_json(ran.out.encode()) == to_engine_json(engine())
        monkeypatch.delenv(VARIABLE)
        without = refused("describe", f"{HOST}:{port}", code=1)
        assert "and there is none here" in without
        monkeypatch.setenv(VARIABLE, write(tmp_path / "open", listing(NEW), 0o644))
        with_an_open_file = refused("describe", f"{HOST}:{port}")
        assert "chmod" in with_an_open_file
        assert NEW.material.hex()[:8] not in without + with_an_open_file
    finally:
        listener.close()


def test_the_table_has_every_worker_with_its_layers_and_heads() -> None:
    with published(engine()) as address:
        ran = run("describe", address)
    assert (ran.code, ran.err) == (0, "")
    shape = "TP 2 · PP 2 · 6 layers · 8 heads · bfloat16 · "
    assert ran.out.startswith(f"engine prefill-0: {shape}")
    words = " ".join(ran.out.split())
    assert " group 1 window of 64, blocks of 16 tokens " in words
    assert " tp1 VRAM 0 0…2 4…7 all 6 " in words
    assert " tp0/pp1 VRAM 0 3…5 0…3 all 6 " in words


def test_an_engine_that_is_not_ready_is_reported_in_one_line() -> None:
    with listening() as (_, port):
        said = refused("describe", f"{HOST}:{port}", code=1)
    assert said == (
        f"kvferry describe: {HOST}:{port} refused: engine is starting; expected an engine whose workers are ready\n"
    )


def test_a_closed_port_is_reported_at_once() -> None:
    started_s = time.monotonic()
    said = refused("describe", f"{HOST}:{free_port()}", "--timeout", "60", code=1)
    assert " is closed: nothing listens there" in said
    assert said.endswith("; of engines only producers listen\n")
    assert time.monotonic() - started_s < 20


def test_a_host_that_cannot_be_reached_is_told_from_a_closed_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of a closed port, so that no test needs a network without a route.
    def no_route(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", no_route)
    address = f"{HOST}:{free_port()}"
    said = refused("describe", address, "--timeout", "60", code=1)
    assert said == f"kvferry describe: {address} cannot be reached: No route to host\n"


@pytest.mark.parametrize(
    "why", ["Name or service not known", "Temporary failure in name resolution"]
)
def test_a_name_that_is_not_found_is_reported_with_the_systems_reason(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, why)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said = refused("describe", "prefill-9:5600", "--timeout", "60", code=1)
    assert said == f"kvferry describe: prefill-9:5600 cannot be looked up: {why}\n"


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that gives every connection to `answer`, and its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                answer(self.request)

    with socketserver.ThreadingTCPServer((HOST, 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"{HOST}:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def speak_first(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH\r\n")
    connection.recv(100)


def answer_lines(connection: socket.socket) -> None:
    found = b""
    while b"\r\n\r\n" not in found and (part := connection.recv(100)):
        found += part
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hang(connection: socket.socket) -> None:
    while connection.recv(100):
        pass


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (speak_first, "is no side channel: its answer begins with b'SSH-2.0-OpenSSH"),
        (answer_lines, "is no side channel: its answer begins with b'HTTP/1.1 400"),
        (lambda connection: None, "it cuts every connection"),
        (hang, "did not answer within 2 s"),
    ],
    ids=["SSH", "HTTP", "closes", "hangs"],
)
def test_a_port_that_speaks_something_else_is_told_from_one_that_hangs(
    answer: Callable[[socket.socket], None], said: str
) -> None:
    with serving(answer) as address:
        assert said in refused("describe", address, "--timeout", "2", code=1)


def test_a_running_engine_sees_no_probe(caplog: pytest.LogCaptureFixture) -> None:
    """It would log one as a connection that ended during the handshake."""
    with published(engine()) as address:
        assert run("describe", address).code == 0
    assert [
        record for record in caplog.records if "refused" in record.getMessage()
    ] == []
