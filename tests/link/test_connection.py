"""How connections are made, lost and given up, and which secrets are tried; more of them in test_secrets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import pytest

from kvferry.link import client as clients
from kvferry.link import limits
from kvferry.link.client import SideChannelClient
from kvferry.link.connection import Connection
from kvferry.link.limits import Backoff
from kvferry.link.secrets import VARIABLE, Secret
from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import EngineDescription, encode
from tests.link.raw_listener import (
    ZMTP,
    answer_of,
    answer_unasked,
    answer_without_end,
    cut,
    end_after_the_request,
    receive_until,
    send_at_once,
)
from tests.link.secret_files import NEW, OLD
from tests.protocol.samples import make_description

ANSWER = answer_of(encode(make_description()))
NEVER_S = 60.0
Ask = Callable[..., Future[EngineDescription]]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


@pytest.fixture
def ask(server: socket.socket) -> Iterator[Ask]:
    """Begins a handshake with the server, with these secrets."""
    port = server.getsockname()[1]

    def fetch(secrets: tuple[Secret, ...]) -> EngineDescription:
        with SideChannelClient(secrets) as client:
            return client.fetch_description(
                "127.0.0.1", port, "prefill-0", "decode-0", NEVER_S
            )

    with ThreadPoolExecutor(1) as threads:
        yield lambda *secrets: threads.submit(fetch, secrets)


def test_without_a_secret_a_connection_that_is_cut_twice_is_made_again(
    server: socket.socket, ask: Ask
) -> None:
    asked = ask()
    cut(server, 2)
    end_after_the_request(server, ANSWER)
    assert asked.result() == make_description()


def test_without_a_secret_a_listener_that_cuts_every_connection_is_refused(
    server: socket.socket, ask: Ask
) -> None:
    asked = ask()
    cut(server, 3)
    with pytest.raises(
        PeerRefused, match=f"most likely because it has a secret.*{VARIABLE}"
    ):
        asked.result()


def test_a_listener_that_does_not_keep_to_the_protocol_fails_the_handshake_at_once(
    server: socket.socket, ask: Ask
) -> None:
    asked = ask()
    send_at_once(server, ZMTP + ANSWER)
    with pytest.raises(HandshakeFailed, match=r"does not speak ZMQ's protocol$"):
        asked.result(NEVER_S / 2)


def test_a_listener_that_answers_without_end_is_cut_off(
    server: socket.socket, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ keeps all frames of a message until the last arrives."""
    monkeypatch.setattr(limits, "SPARE_BYTES", 1 << 16)
    monkeypatch.setattr(clients, "MAX_PART_FRAME_BYTES", 1 << 16)
    asked = ask()
    endless = 1 << 30
    assert [answer_without_end(server, endless) < endless for _ in range(3)] == [
        True
    ] * 3
    with pytest.raises(HandshakeFailed, match="ended 3 connections without an answer"):
        asked.result()


def test_a_listener_costs_little_memory_however_long_a_description_may_be(
    server: socket.socket, ask: Ask
) -> None:
    """Empty frames take 32 times their bytes in ZMQ's memory: 72 MB of them, as many as a description may have, 2.3 GB.
    What TCP holds at both ends is not in it."""
    asked = ask()
    assert max(answer_without_end(server, 64 << 20) for _ in range(3)) < 12 << 20
    with pytest.raises(HandshakeFailed):
        asked.result()


def test_an_answer_of_many_empty_frames_is_refused_at_its_third_and_never_holds_the_loop_up(
    server: socket.socket,
) -> None:
    """ZMQ hands all of them over at once. Renewals of leases use the same loop."""
    answer = b"\x01\x00" * 250_000 + b"\x00\x00"
    turns_s: list[float] = []

    async def turn() -> None:
        while True:
            turns_s.append(time.thread_time())
            await asyncio.sleep(0.001)

    with SideChannelClient() as client, ThreadPoolExecutor(1) as threads:
        client.call_soon(lambda: asyncio.ensure_future(turn()))
        threads.submit(end_after_the_request, server, answer)
        with pytest.raises(HandshakeFailed, match="another number of frames than one"):
            client.fetch_description(
                "127.0.0.1", server.getsockname()[1], "prefill-0", "decode-0", NEVER_S
            )
    assert max(after - before for before, after in pairwise(turns_s)) < 0.1


def test_a_request_whose_connection_ends_is_sent_again_at_once(
    server: socket.socket, ask: Ask
) -> None:
    """The listener has restarted."""
    asked = ask()
    end_after_the_request(server)
    end_after_the_request(server, ANSWER)
    assert asked.result() == make_description()


def test_a_listener_that_ends_every_connection_fails_the_handshake_long_before_its_deadline(
    server: socket.socket, ask: Ask
) -> None:
    asked = ask()
    for _ in range(limits.ATTEMPTS):
        end_after_the_request(server)
    with pytest.raises(
        HandshakeFailed,
        match=f":{server.getsockname()[1]} ended 3 connections without an answer$",
    ):
        asked.result(NEVER_S / 2)


def test_nothing_is_sent_over_the_plain_connection_that_finds_out_why_no_secret_was_accepted_and_no_answer_taken(
    server: socket.socket, ask: Ask
) -> None:
    asked = ask(OLD, NEW)
    cut(server, 2)
    assert b"hello" not in answer_unasked(server, ANSWER)
    with pytest.raises(PeerRefused, match="it has no secret, and there is one here"):
        asked.result()


def test_a_listener_that_cuts_the_plain_connection_too_has_another_secret(
    server: socket.socket, ask: Ask
) -> None:
    asked = ask(OLD, NEW)
    cut(server, 3)
    with pytest.raises(PeerRefused) as refused:
        asked.result()
    assert (
        f"none of the secrets listed here ({OLD.fingerprint}, {NEW.fingerprint})"
        in str(refused.value)
    )


def test_a_listener_without_a_secret_is_known_by_the_first_connection_with_one(
    server: socket.socket, ask: Ask
) -> None:
    asked = ask(OLD, NEW)
    assert b"hello" not in answer_unasked(server, ANSWER)
    with pytest.raises(PeerRefused, match="it has no secret"):
        asked.result()


def test_delays_double_up_to_a_bound_and_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backoff = Backoff(1.0, 5.0)
    assert len({backoff.delay_s(1) for _ in range(10)}) > 1
    assert all(0.5 <= backoff.delay_s(1) <= 1.5 for _ in range(100))
    monkeypatch.setattr("kvferry.link.limits.random.uniform", lambda *_: 1.0)
    assert [backoff.delay_s(failures) for failures in (1, 2, 3, 4, 1000)] == [
        1.0,
        2.0,
        4.0,
        5.0,
        5.0,
    ]


def test_the_loop_sleeps_while_nobody_receives_what_has_arrived(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ's file stays readable until somebody asks what has arrived: the loop would run without a pause."""
    num_reads = 0
    read = vars(Connection)["_read"]

    def counted(connection: Connection) -> None:
        nonlocal num_reads
        num_reads += 1
        read(connection)

    def answer() -> socket.socket:
        connection, _ = server.accept()
        connection.sendall(ZMTP)
        receive_until(connection, b"hello")
        connection.sendall(answer_of(b"answer"))
        return connection

    async def hold(client: SideChannelClient, answered: Future[socket.socket]) -> bytes:
        connection = await client.connect("127.0.0.1", server.getsockname()[1], 1000)
        try:
            connection.send(b"hello")
            await asyncio.wrap_future(answered)
            while not num_reads:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            return await connection.receive()
        finally:
            connection.close()

    monkeypatch.setattr(Connection, "_read", counted)
    with SideChannelClient() as client, ThreadPoolExecutor(1) as threads:
        answered = threads.submit(answer)
        assert client.wait_for(hold(client, answered)) == b"answer"
        answered.result().close()
    assert num_reads < 20


def test_of_long_messages_few_are_taken_in_one_turn_of_the_loop(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To decode one may take 50 ms: sixteen in a turn held renewals to all peers up for a second."""
    monkeypatch.setattr(limits, "BYTES_AT_ONCE", 1000)
    num_messages = 8
    taken_at: list[int] = []
    turn = 0

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(ZMTP)
            receive_until(connection, b"hello")
            connection.sendall(answer_of(bytes(500)) * num_messages)
            while connection.recv(4096):
                pass

    def take(_: bytes) -> None:
        taken_at.append(turn)
        time.sleep(0.01)  # it is decoded, and the next one arrives meanwhile

    async def count_turns(client: SideChannelClient) -> None:
        nonlocal turn
        connection = await client.connect("127.0.0.1", server.getsockname()[1], 1000)
        connection.receive_all(take)
        connection.send(b"hello")
        while len(taken_at) < num_messages:
            turn += 1
            await asyncio.sleep(0)
        connection.close()

    with SideChannelClient() as client, ThreadPoolExecutor(1) as threads:
        answered = threads.submit(answer)
        client.wait_for(count_turns(client))
        answered.result()
    assert max(Counter(taken_at).values()) <= 2
