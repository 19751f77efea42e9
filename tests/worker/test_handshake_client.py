"""Fetching a description: one answer, one deadline, and a typed error for any other answer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from kvferry.protocol.errors import HandshakeFailed, InputError, KvferryError, PeerRefused
from kvferry.protocol.handshake import EngineDescription, Hello, Refused, decode_request, encode
from kvferry.worker.peers.handshake_client import AskingThreads, fetch_description
from tests.protocol.samples import make_description
from tests.waiting import wait_until

TIMEOUT_S = 5.0


@contextlib.contextmanager
def answering(*frames: bytes, host: str = "127.0.0.1") -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers one request with `frames`; yields its port and the requests it received."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    port = socket.bind_to_random_port(f"tcp://{host}")
    asked: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(zmq.Again):
            asked.append(socket.recv())
            socket.send_multipart(frames)

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield port, asked
    finally:
        server.join()
        context.destroy()


def fetch(
    port: int, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S, threads: AskingThreads | None = None
) -> EngineDescription:
    return fetch_description(host, port, "prefill-0", "decode-0", timeout_s, (), threads)


def alive() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_description_comes_as_it_was_sent_and_the_asker_names_itself(host: str) -> None:
    description = make_description()
    with answering(encode(description)) as (port, asked):
        assert fetch(port, host) == description
    assert decode_request(asked[0]) == Hello(engine_id="prefill-0", asker="decode-0")


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_may_have_brackets_or_not(host: str) -> None:
    try:
        with answering(encode(make_description()), host="[::1]") as (port, _):
            assert fetch(port, host) == make_description()
    except zmq.ZMQError:
        pytest.skip("this machine has no IPv6")


def test_a_refusal_is_raised_with_its_field() -> None:
    refused = Refused(field="engine", value="starting", expected="an engine whose workers are ready")
    with answering(encode(refused)) as (port, _), pytest.raises(PeerRefused, match="'engine' is 'starting'"):
        fetch(port)


GARBAGE = {
    "empty": b"",
    "text": b"HTTP/1.1 400 Bad Request",
    "another message": encode(Hello(engine_id="a", asker="b")),
    "a description of a later version": encode(msgspec.structs.replace(make_description(), version=2)),
    "half a description": encode(make_description())[:100],
    "deeply nested": b"\x91" * 100_000,
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_is_none_of_the_protocols_is_an_input_error(frame: bytes) -> None:
    with answering(frame) as (port, _), pytest.raises(InputError):
        fetch(port)


def test_an_answer_of_several_frames_is_refused() -> None:
    with answering(encode(make_description()), b"more") as (port, _), pytest.raises(HandshakeFailed, match="2 frames"):
        fetch(port)


def test_an_answer_longer_than_the_bound_is_never_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.peers.handshake_client.MAX_REPLY_BYTES", 1000)
    with answering(bytes(1001)) as (port, _), pytest.raises(HandshakeFailed, match="did not answer"):
        fetch(port, timeout_s=0.3)


def test_silence_ends_with_the_deadline() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    began_s = time.monotonic()
    with pytest.raises(HandshakeFailed, match=r"did not answer within 0\.2 s"):
        fetch(port, timeout_s=0.2)
    assert time.monotonic() - began_s < TIMEOUT_S
    context.destroy(linger=0)


@pytest.mark.parametrize("host", ["", "*", "a b", "\N{SNOWMAN}", "127.0.0.1/24", "tcp://127.0.0.1", "x" * 300])
def test_a_host_that_is_none_is_a_failed_handshake(host: str) -> None:
    with pytest.raises(KvferryError):
        fetch(1, host, timeout_s=0.2)


def test_neither_a_socket_nor_a_thread_of_zmq_outlives_a_failed_handshake() -> None:
    before = alive()
    for _ in range(5):
        with pytest.raises(HandshakeFailed):
            fetch(1, timeout_s=0.05)
    wait_until(lambda: alive() <= before, "all is given back")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.0.0.1/24", "localhost"])
def test_shared_threads_keep_no_socket_of_a_handshake_and_end_when_they_are_closed(host: str) -> None:
    before = alive()
    threads = AskingThreads()
    threads.start()
    ready = alive()
    for _ in range(5):
        with pytest.raises(KvferryError):
            fetch(1, host, timeout_s=0.05, threads=threads)
    wait_until(lambda: alive() <= ready, "the sockets are given back")
    threads.close()
    threads.close()
    wait_until(lambda: alive() <= before, "the threads have ended")


def test_handshakes_that_share_threads_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = AskingThreads()
    monkeypatch.setattr("kvferry.worker.peers.handshake_client.own_threads", lambda: pytest.fail("threads of its own"))
    for _ in range(2):
        with answering(encode(make_description())) as (port, _):
            assert fetch(port, threads=threads) == make_description()
    threads.close()


def test_a_name_is_not_looked_up_on_the_threads_that_others_use() -> None:
    """The shared threads are closed here, and the handshake with a name goes on: it has threads of its own."""
    threads = AskingThreads()
    threads.close()
    with answering(encode(make_description())) as (port, _):
        assert fetch(port, "localhost", threads=threads) == make_description()
    with pytest.raises(HandshakeFailed, match="closed"):
        fetch(port, "127.0.0.1", threads=threads)


def test_closing_the_threads_does_not_wait_and_lets_a_handshake_under_way_end() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = context.socket(zmq.REP)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    threads = AskingThreads()
    found: list[EngineDescription] = []
    asker = threading.Thread(target=lambda: found.append(fetch(port, threads=threads)))
    asker.start()
    listener.recv()
    threads.close()
    assert asker.is_alive()
    listener.send(encode(make_description()))
    asker.join()
    assert found == [make_description()]
    context.destroy(linger=0)
