"""The benchmark's listener: it serves its own memory to one client at a time, and no input ends it."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvferry.cli.bench import listener as listener_module
from kvferry.cli.bench.listener import BenchListener
from kvferry.cli.transfer.messages import (
    MAX_FRAME_BYTES,
    Alive,
    Join,
    Leave,
    Noted,
    ReadsFailed,
    Reply,
    decode_reply,
    encode_frame,
)
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.secrets import VARIABLE
from kvferry.protocol.handshake import Hello, Refused
from kvferry.protocol.handshake import encode as encode_channel
from tests.cli.bench_listener import TASK, Served, bench_listening
from tests.cli.command import refused
from tests.link.channel import HOST, client, free_port
from tests.link.secret_files import NEW, OLD, OTHER, listing, write
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SESSION = "ab" * 16
JOIN = {
    "type": "bench join",
    "version": 1,
    "session": SESSION,
    "host": "x",
    "agent_metadata": b"m",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with bench_listening() as serving:
        yield serving


def ask_raw(port: int, body: bytes) -> Reply:
    with client(port, zmq.REQ) as client_id:
        client_id.send(body)
        return decode_reply(client_id.recv())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "message"),
        (b"GET / HTTP/1.1\r\n", "message"),
        (b"\xc1" * 100, "message"),
        (b"\x91" * 100_000, "message"),
        (msgspec.msgpack.encode({"type": "bench steal"}), "type"),
        (msgspec.msgpack.encode({**JOIN, "session": "../../etc/passwd"}), "session"),
        (msgspec.msgpack.encode({**JOIN, "host": "a\nb"}), "host"),
        (
            msgspec.msgpack.encode({**JOIN, "agent_metadata": b"m" * (129 << 10)}),
            "agent_metadata",
        ),
        (msgspec.msgpack.encode({**JOIN, "agent_metadata": b""}), "agent_metadata"),
        (msgspec.msgpack.encode({**JOIN, "version": 2}), "version"),
        (msgspec.msgpack.encode({**JOIN, "version": 2**63}), "version"),
        (
            msgspec.msgpack.encode(
                {
                    "type": "bench leave",
                    "session": SESSION,
                    "wrong": -1,
                    "complete": True,
                }
            ),
            "wrong",
        ),
        (encode_channel(Hello(engine_id="prefill-0", client_id="x")), "type"),
    ],
    ids=range(13),
)
def test_an_invalid_frame_is_refused_by_its_field_and_ends_nothing(
    served: Served, body: bytes, field: str
) -> None:
    reply = ask_raw(served.port, body)
    assert isinstance(reply, Refused)
    assert reply.field == field
    assert served.codes == []


def test_too_many_or_too_long_frames_and_bytes_that_are_not_zmq_end_nothing(
    served: Served,
) -> None:
    before = served.listener.counters.total("bad_frames")
    with client(served.port) as dealer:
        dealer.send_multipart([b"", b"x", b"y"])
        dealer.send_multipart([b"not empty", encode_frame(Alive(session=SESSION))])
        dealer.send_multipart([b""] * 1000)
        dealer.send_multipart([b"", b"x" * (MAX_FRAME_BYTES + 1)])
    with socket.create_connection((HOST, served.port)) as plain:
        plain.sendall(secrets.token_bytes(10_000))
    wait_until(
        lambda: served.listener.counters.total("bad_frames") >= before + 3,
        "the frames were counted",
    )
    assert not any("bug" in line for line in served.said)
    assert isinstance(served.ask(Alive(session=SESSION)), Refused)


@pytest.mark.parametrize(
    ("metadata", "said"), [(b"refuse", "no such metadata"), (b"crash", "signal 6")]
)
def test_metadata_that_kills_the_owner_is_reported_at_both_ends(
    metadata: bytes, said: str
) -> None:
    with bench_listening() as served:
        session = served.join(metadata)
        replies: list[Reply] = []

        def is_refused() -> bool:
            replies.append(served.ask(Alive(session=session)))
            return isinstance(replies[-1], Refused)

        wait_until(is_refused, "the session ended")
        wait_until(lambda: served.codes == [2], "the listener ended")
        assert said in served.said[-1]
        assert said in str(replies[-1])


def test_while_a_client_reads_another_is_refused_and_has_no_say_in_its_session() -> (
    None
):
    with bench_listening() as served:
        session = served.join()
        other = served.ask(
            Join(session=secrets.token_hex(16), host="test", agent_metadata=b"m")
        )
        assert isinstance(other, Refused)
        assert other.field == "client"
        for message in (
            Alive(session=SESSION),
            Leave(session=SESSION, wrong=0, complete=True),
        ):
            refused = served.ask(message)
            assert isinstance(refused, Refused)
            assert refused.field == "session"
        assert served.ask(Alive(session=session)) == Noted()
        assert served.codes == []


def test_a_silent_client_ends_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "SILENT_S", 0.1)
    with bench_listening() as served:
        served.join()
        wait_until(lambda: served.codes == [2], "it ended")
        assert "no message for" in served.said[-1]


@pytest.mark.parametrize(
    ("wrong", "complete", "code"), [(0, True, 0), (7, True, 1), (0, False, 2)]
)
def test_the_exit_status_is_what_the_client_found(
    wrong: int, complete: bool, code: int
) -> None:
    with bench_listening() as served:
        session = served.join()
        assert (
            served.ask(Leave(session=session, wrong=wrong, complete=complete))
            == Noted()
        )
        wait_until(lambda: served.codes == [code], "it ended")


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (
            "sys.exit('no NIXL today')",
            "ended with status 1: no NIXL today; see `kvferry doctor`",
        ),
        ("time.sleep(3600)", "hangs at its start; see `kvferry doctor`"),
    ],
)
def test_without_memory_the_listener_says_why(
    owner: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "START_S", 2.0)
    command = ("-c", f"import sys, time; {owner}")
    listener = BenchListener(HOST, free_port(), TASK, (), print, command)
    with contextlib.closing(listener), pytest.raises(ReadsFailed, match=said):
        listener.serve()


def test_without_a_secret_the_metadata_of_another_hosts_client_never_reaches_nixl() -> (
    None
):
    """NIXL parses it in native code."""
    with bench_listening(allowed=AllowedHosts.from_entries(["10.0.0.0/8"])) as served:
        wait_until(
            lambda: any("listening" in line for line in served.said),
            "its memory is ready",
        )
        reply = served.ask(Join(session=SESSION, host="x", agent_metadata=b"m"))
        assert isinstance(reply, Refused)
        assert (reply.field, reply.value) == ("client", HOST)
        assert VARIABLE in reply.expected
        assert "--allowed-hosts" in reply.expected
        assert served.listener._join is None
    with bench_listening(allowed=AllowedHosts.from_entries(["127.0.0.0/8"])) as served:
        served.join()


def test_only_clients_with_the_secret_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench_listening(known=(NEW,)) as served:
        for file, said in (
            (
                write(tmp_path / "other", listing(OTHER)),
                "it has none of the secrets listed here",
            ),
            (None, "and there is none here"),
        ):
            monkeypatch.delenv(
                VARIABLE, raising=False
            ) if file is None else monkeypatch.setenv(VARIABLE, file)
            assert said in refused("bench", "--connect", f"{HOST}:{served.port}")
        assert isinstance(served.ask(Alive(session=SESSION), (OLD, NEW)), Refused)


def test_a_missing_listener_is_reported_in_one_line_with_a_hint() -> None:
    said = refused("bench", "--connect", f"{HOST}:{free_port()}", "--timeout", "0.2")
    for word in (
        "did not answer within 0.2 s",
        "port",
        "firewall",
        "UCX_NET_DEVICES",
        "kvferry doctor",
    ):
        assert word in said
