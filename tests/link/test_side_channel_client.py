"""The client of the side channel: one answer, one deadline, and a typed error for any other answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import msgspec
import pytest
import zmq

from kvferry.link import client as clients
from kvferry.link.client import SideChannelClient
from kvferry.link.connection import Connection
from kvferry.protocol.errors import (
    HandshakeFailed,
    InputError,
    KvferryError,
    NothingListens,
    PeerRefused,
)
from kvferry.protocol.handshake import (
    CHANNEL_VERSION,
    EngineDescription,
    Hello,
    Refused,
    decode_request,
    encode,
)
from tests.link.raw_listener import answer_of, end_after_the_request
from tests.open_files import open_files
from tests.processes import task_count
from tests.protocol.samples import make_description
from tests.waiting import wait_until

TIMEOUT_S = 5.0
NEVER_S = 60.0


@contextlib.contextmanager
def answering(
    *frames: bytes, host: str = "127.0.0.1", port: int = 0
) -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers one request with `frames`; yields its port and the requests it received."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.REP)
    server.setsockopt(zmq.LINGER, 1000)
    server.setsockopt(zmq.RCVTIMEO, 10_000)
    server.setsockopt(zmq.IPV6, int(":" in host))
    if port:
        server.bind(f"tcp://{host}:{port}")
    else:
        port = server.bind_to_random_port(f"tcp://{host}")
    asked: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(zmq.Again):
            asked.append(server.recv())
            server.send_multipart(frames)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port, asked
    finally:
        thread.join()
        context.destroy()


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    with SideChannelClient() as client:
        yield client


def fetch(
    client: SideChannelClient,
    port: int,
    host: str = "127.0.0.1",
    timeout_s: float = TIMEOUT_S,
) -> EngineDescription:
    return client.fetch_description(host, port, "prefill-0", "decode-0", timeout_s)


def alive() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), task_count()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_description_comes_as_it_was_sent_and_the_asker_names_itself(
    client: SideChannelClient, host: str
) -> None:
    description = make_description()
    with answering(encode(description)) as (port, asked):
        assert fetch(client, port, host) == description
    assert decode_request(asked[0]) == Hello(
        engine_id="prefill-0", client_id="decode-0", at=0
    )


def test_a_refusal_is_raised_with_its_field(client: SideChannelClient) -> None:
    refused = Refused(
        field="engine", value="starting", expected="an engine whose workers are ready"
    )
    with (
        answering(encode(refused)) as (port, _),
        pytest.raises(PeerRefused, match="engine is starting; expected"),
    ):
        fetch(client, port)


GARBAGE = {
    "empty": b"",
    "text": b"HTTP/1.1 400 Bad Request",
    "another message": encode(Hello(engine_id="a", client_id="b")),
    "a description of a later version": encode(
        msgspec.structs.replace(make_description(), version=CHANNEL_VERSION + 1)
    ),
    "half a description": encode(make_description())[:100],
    "deeply nested": b"\x91" * 100_000,
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_is_none_of_the_protocols_is_an_input_error(
    client: SideChannelClient, frame: bytes
) -> None:
    with answering(frame) as (port, _), pytest.raises(InputError):
        fetch(client, port)


def test_an_answer_of_several_frames_is_refused(client: SideChannelClient) -> None:
    with (
        answering(encode(make_description()), b"more") as (port, _),
        pytest.raises(HandshakeFailed, match="another number of frames"),
    ):
        fetch(client, port)


def test_an_answer_longer_than_the_bound_is_never_taken_in(
    client: SideChannelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "MAX_PART_FRAME_BYTES", 1000)
    with answering(bytes(1001)) as (port, _), pytest.raises(HandshakeFailed):
        fetch(client, port, timeout_s=0.5)


def test_silence_ends_with_the_deadline(client: SideChannelClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        with pytest.raises(HandshakeFailed, match=r"did not answer within 0\.2 s"):
            fetch(client, silent.getsockname()[1], timeout_s=0.2)
        assert time.monotonic() - began_s < TIMEOUT_S


def test_a_closed_port_is_known_as_closed_and_costs_no_deadline(
    client: SideChannelClient,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(NothingListens, match="nothing listens there"):
        client.wait_for(client.connect("127.0.0.1", port, 1000))
    with pytest.raises(HandshakeFailed, match="nothing listens there"):
        client.fetch_description(
            "127.0.0.1", port, "prefill-0", "decode-0", NEVER_S, waits=False
        )


def test_an_answer_is_taken_although_the_connection_ends_with_it(
    client: SideChannelClient,
) -> None:
    answer = answer_of(encode(make_description()))
    for _ in range(100):
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            ThreadPoolExecutor(1) as threads,
        ):
            threads.submit(end_after_the_request, server, answer)
            assert fetch(client, server.getsockname()[1]) == make_description()


@pytest.mark.parametrize(
    "host",
    ["", "*", "a b", "\N{SNOWMAN}", "127.0.0.1/24", "tcp://127.0.0.1", "x" * 300],
)
def test_a_host_that_is_none_is_a_failed_handshake(
    client: SideChannelClient, host: str
) -> None:
    with pytest.raises(KvferryError):
        fetch(client, 1, host, timeout_s=0.2)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "127.0.0.1/24", "localhost"])
def test_no_socket_outlives_a_failed_handshake_and_no_thread_the_client(
    host: str,
) -> None:
    before = alive()
    with SideChannelClient() as client:
        ready = alive()
        for first in (True, *[False] * 5):
            with pytest.raises(KvferryError):
                fetch(client, 1, host, timeout_s=0.05)
            if first:
                ready = alive()  # all threads have started
        wait_until(lambda: alive() <= ready, "the sockets are given back")
    client.close()
    wait_until(lambda: alive() <= before, "the threads have ended")


def test_files_bound_the_number_of_connections_and_not_the_sockets_that_zmq_gives_by_default(
    client: SideChannelClient,
) -> None:
    """With 1,023 sockets, three a connection, the 342nd failed: "Too many open files"."""
    count = 400
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")

    async def connect() -> list[Connection]:
        return await asyncio.gather(
            *(client.connect("127.0.0.1", port, 1000) for _ in range(count))
        )

    async def close(connections: list[Connection]) -> None:
        for each in connections:
            each.close()

    try:
        connected = client.wait_for(connect())
        assert len(connected) == count
        client.wait_for(close(connected))
    finally:
        context.destroy(linger=0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("part", "failed"),
    [
        ("EndlessMessages", OSError(errno.EMFILE, "too many open files")),
        ("threading.Thread.start", RuntimeError("no thread")),
    ],
)
def test_a_client_that_cannot_start_closes_what_it_opened(
    part: str, failed: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    monkeypatch.setattr(f"kvferry.link.client.{part}", mock.Mock(side_effect=failed))
    with pytest.raises(type(failed)):
        SideChannelClient()
    assert open_files() <= before


def test_a_process_that_is_forked_does_not_wait_for_the_thread_that_it_lacks() -> None:
    script = """
import os
import signal
from kvferry.link.client import SideChannelClient
from kvferry.link.counters import Counters
from kvferry.link.peer_link import PeerLinks
from kvferry.link.renewer import LeaseRenewer

renewer = LeaseRenewer(PeerLinks(SideChannelClient(), Counters()))
forked = os.fork()
signal.alarm(50)
renewer.close()
if forked:
    _, status = os.waitpid(forked, 0)
    raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_closing_ends_handshakes_under_way_and_refuses_more(
    client: SideChannelClient,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor(5) as threads,
    ):
        port = silent.getsockname()[1]
        asked = [
            threads.submit(fetch, client, port, timeout_s=NEVER_S) for _ in range(5)
        ]
        accepted = [silent.accept()[0] for _ in asked]
        client.close()
        for connection in accepted:
            connection.close()
        for each in asked:
            assert str(each.exception(NEVER_S / 2)) == "this side channel is closed"
        with pytest.raises(HandshakeFailed, match=r"^this side channel is closed$"):
            fetch(client, port)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_may_have_brackets_or_not(
    client: SideChannelClient, host: str
) -> None:
    try:
        with answering(encode(make_description()), host="[::1]") as (port, _):
            assert fetch(client, port, host) == make_description()
    except zmq.ZMQError:
        pytest.skip("this machine has no IPv6")
