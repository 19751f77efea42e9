"""Which secrets are tried when a connection is made, and what is said when none will do; more in test_secrets."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.protocol.errors import HandshakeFailed, KvferryError, PeerRefused
from kvferry.protocol.handshake import EngineDescription, encode
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.connection import backoff_s
from kvferry.protocol.side_channel.secrets import VARIABLE, Secrets
from tests.protocol.raw_listener import ZMTP, answer_of, answer_unasked, cut, end_after_the_request, send_at_once
from tests.protocol.samples import make_description
from tests.protocol.secret_files import NEW, OLD

ANSWER = answer_of(encode(make_description()))


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


class Asking:
    """A handshake under way."""

    def __init__(self, server: socket.socket, secrets: Secrets) -> None:
        self._ended: queue.SimpleQueue[EngineDescription | KvferryError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._ask, args=(server.getsockname()[1], secrets))
        self._thread.start()

    def _ask(self, port: int, secrets: Secrets) -> None:
        with SideChannelClient(secrets) as client:
            try:
                self._ended.put(client.fetch_description("127.0.0.1", port, "prefill-0", "decode-0", 30.0))
            except KvferryError as error:
                self._ended.put(error)

    def result(self) -> EngineDescription | KvferryError:
        self._thread.join()
        return self._ended.get_nowait()


def test_without_a_secret_a_connection_that_is_cut_twice_is_made_again(server: socket.socket) -> None:
    asking = Asking(server, ())
    cut(server, 2)
    end_after_the_request(server, ANSWER)
    assert asking.result() == make_description()


def test_without_a_secret_a_listener_that_cuts_every_connection_is_refused(server: socket.socket) -> None:
    asking = Asking(server, ())
    cut(server, 3)
    error = asking.result()
    assert isinstance(error, PeerRefused)
    assert "most likely because it has a secret" in str(error)
    assert VARIABLE in str(error)


def test_a_listener_that_does_not_keep_to_the_protocol_fails_the_handshake_at_once(server: socket.socket) -> None:
    asking = Asking(server, ())
    send_at_once(server, ZMTP + ANSWER)
    error = asking.result()
    assert isinstance(error, HandshakeFailed)
    assert str(error).endswith("does not keep to the protocol of ZMQ")


def test_nothing_is_sent_over_the_plain_connection_that_finds_out_why_no_secret_was_accepted_and_no_answer_taken(
    server: socket.socket,
) -> None:
    asking = Asking(server, (OLD, NEW))
    cut(server, 2)
    assert b"hello" not in answer_unasked(server, ANSWER)
    error = asking.result()
    assert isinstance(error, PeerRefused)
    assert "it has no secret, and there is one here" in str(error)


def test_a_listener_that_cuts_the_plain_connection_too_has_another_secret(server: socket.socket) -> None:
    asking = Asking(server, (OLD, NEW))
    cut(server, 3)
    error = asking.result()
    assert isinstance(error, PeerRefused)
    assert f"none of the secrets listed here ({OLD.fingerprint}, {NEW.fingerprint})" in str(error)


def test_a_listener_without_a_secret_is_known_by_the_first_connection_with_one(server: socket.socket) -> None:
    asking = Asking(server, (OLD, NEW))
    assert b"hello" not in answer_unasked(server, ANSWER)
    assert "it has no secret" in str(asking.result())


def test_delays_double_up_to_a_bound_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({backoff_s(1, 1.0, 8.0) for _ in range(10)}) > 1
    assert all(0.5 <= backoff_s(1, 1.0, 8.0) <= 1.5 for _ in range(100))
    monkeypatch.setattr("kvferry.protocol.side_channel.connection.random.uniform", lambda *_: 1.0)
    assert [backoff_s(failures, 1.0, 5.0) for failures in (1, 2, 3, 4, 1000)] == [1.0, 2.0, 4.0, 5.0, 5.0]
