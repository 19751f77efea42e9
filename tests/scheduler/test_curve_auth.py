"""The listener's authentication: whatever comes in place of a good handshake, others are served."""

from __future__ import annotations

import errno
import os
import socket

import pytest
import zmq

from kvferry.protocol.errors import InvalidSecretFile, KvferryError
from kvferry.protocol.handshake import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    Refused,
    decode_reply,
)
from kvferry.protocol.side_channel.secrets import Secret, Secrets
from kvferry.protocol.side_channel.sockets import asking_socket
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.state import Counters
from tests.harness.handshake import fetch_description
from tests.protocol.secret_files import NEW, OLD
from tests.scheduler.channel import HOST, RecordingListener, free_port, threads_named
from tests.scheduler.test_secrets import handshake, protected
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


RAW = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "noise": b"\xff" * 1000,
    "an older version": b"\x01\x00\x01\x00xxxx",
    "a plain greeting": GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    "a greeting and noise": GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + b"\xff" * 300,
    "half a greeting": GREETING,
}


@pytest.mark.parametrize("secrets", [(), (OLD, NEW)], ids=["plain", "secrets"])
def test_bytes_that_are_not_zmq_get_no_answer_and_stop_nothing(secrets: Secrets) -> None:
    with protected(secrets) as (listener, port):
        for payload in RAW.values():
            with socket.create_connection((HOST, port)) as raw:
                raw.sendall(payload)
        assert handshake(port, secrets)
        assert listener.inbox.empty()


def test_the_greatest_message_fits_with_encryption_around_it_and_one_more_byte_does_not() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with protected((OLD,)) as (_, port), context, asking_socket(context, HOST, OLD, MAX_REPLY_BYTES) as sock:
        sock.connect(f"tcp://{HOST}:{port}")
        for size in (MAX_REQUEST_BYTES, MAX_REQUEST_BYTES + 1):
            sock.send_multipart([b"", bytes(size)])
            assert isinstance(decode_reply(sock.recv_multipart()[1]), Refused)
        sock.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1000)])
        assert sock.poll(300) == 0
        assert handshake(port, (OLD,))


def test_a_zmq_without_encryption_stops_the_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(private: bytes) -> bytes:
        raise zmq.ZMQError(errno.ENOTSUP)

    monkeypatch.setattr(zmq, "curve_public", without)
    with pytest.raises(InvalidSecretFile, match="CURVE"):
        RecordingListener(HOST, free_port(), Counters(), (Secret(os.urandom(32)),))
    with pytest.raises(InvalidSecretFile, match="CURVE"):
        LeaseRenewer(Counters(), (Secret(os.urandom(32)),))
    assert not threads_named("kvferry-listener")


def test_an_exception_in_curve_auth_does_not_stop_the_listener(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    with protected((OLD,), counters) as (listener, port):
        assert listener._socket._curve_auth is not None
        with monkeypatch.context() as patch:
            patch.setattr(listener._socket._curve_auth, "_admits", lambda frames: 1 / 0)
            with pytest.raises(KvferryError):
                fetch_description(HOST, port, "prefill-0", "test", 0.3, (OLD,))
            wait_until(lambda: counters.total("bad_frames") >= 1, "the error is counted")
        assert handshake(port, (OLD,))


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"", b"1.0"], [b"", b"2.0", b"1", b"", b"", b"", b"CURVE", b"x"], [b"", b"1.0", b"1"], [b"\xff"] * 50],
    ids=str,
)
def test_a_malformed_zap_request_is_dropped_or_denied(frames: list[bytes], counters: Counters) -> None:
    with protected((OLD,), counters) as (listener, port):
        sock = listener._socket._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect("inproc://zeromq.zap.01")
        sock.send_multipart(frames or [b""])
        assert handshake(port, (OLD,))
        while sock.poll(0):
            assert b"200" not in sock.recv_multipart()
        sock.close()
        assert counters.total("bad_frames") == 0
