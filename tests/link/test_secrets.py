"""The side channel with secrets, over real sockets: which peers are admitted, and what both ends log."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import zmq

from kvferry.link.commands import ReleaseLease, RemoteLease
from kvferry.link.counters import Counters
from kvferry.link.guarded_socket import REASONS
from kvferry.link.secrets import VARIABLE, Secret, Secrets
from kvferry.link.sockets import KeyPair, client_keys, listener_keys
from kvferry.protocol.errors import InvalidSecretFile, PeerRefused
from kvferry.protocol.handshake import (
    Hello,
    LeaseName,
    Release,
    encode,
)
from tests.harness.handshake import fetch_description
from tests.link.channel import (
    HOST,
    RecordingListener,
    client,
    free_port,
    listening,
    renewing,
    threads_named,
)
from tests.link.secret_files import NEW, OLD, OTHER
from tests.protocol.samples import BOOT, make_description
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
"""Every refusal must come long before it."""

HELLO = encode(Hello(engine_id="prefill-0", client_id="test"))
NAME = LeaseName(slot=1, epoch=f"{2:015x}")
LISTS: list[Secrets] = [(), (OLD,), (NEW,), (OLD, NEW), (NEW, OLD), (OTHER, NEW)]


def protected(
    secrets: Secrets, counters: Counters | None = None
) -> AbstractContextManager[tuple[RecordingListener, int]]:
    """A listener with these secrets, which describes itself."""
    return listening(counters, secrets, description=make_description())


def handshake(port: int, secrets: Secrets) -> bool:
    """Whether it succeeds; a refusal must be a typed error."""
    try:
        return (
            fetch_description(HOST, port, "prefill-0", "test", TIMEOUT_S, secrets)
            == make_description()
        )
    except PeerRefused:
        return False


def go_together(theirs: Secrets, ours: Secrets) -> bool:
    """Whether the listener's first secret is among those listed here, as the documentation requires."""
    return theirs[0] in ours if theirs else not ours


def refused(counters: Counters) -> int:
    return sum(counters.total("side_channel_refusals", reason) for reason in REASONS)


def release_lease(port: int) -> ReleaseLease:
    return ReleaseLease(RemoteLease(HOST, port, BOOT, NAME, 3600.0))


@pytest.mark.parametrize("theirs", LISTS)
@pytest.mark.parametrize("ours", LISTS)
def test_engines_speak_if_the_listeners_first_secret_is_listed_by_the_asker(
    theirs: Secrets, ours: Secrets
) -> None:
    """Handshakes and releases alike; a refusal comes before the deadline."""
    counters = Counters()
    renewer = renewing(counters, ours)
    started_s = time.monotonic()
    try:
        with protected(theirs) as (listener, port):
            assert handshake(port, ours) == go_together(theirs, ours)
            renewer.submit([release_lease(port)])
            if go_together(theirs, ours):
                assert listener.inbox.get(timeout=TIMEOUT_S) == Release(
                    boot=BOOT, leases=(NAME,)
                )
                assert counters.total("side_channel_errors") == 0
            else:
                wait_until(
                    lambda: counters.total("side_channel_errors") == 1,
                    "the lost message is counted",
                    TIMEOUT_S,
                )
                assert listener.inbox.empty()
    finally:
        renewer.close()
    assert time.monotonic() - started_s < TIMEOUT_S / 2


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ((OLD,), (), "and there is none here"),
        ((), (OLD,), "it has no secret, and there is one here"),
        ((OLD,), (NEW,), f"none of the secrets listed here ({NEW.fingerprint})"),
        (
            (OLD, NEW),
            (NEW, OTHER),
            f"none of the secrets listed here ({NEW.fingerprint}, {OTHER.fingerprint})",
        ),
    ],
    ids=["missing", "superfluous", "another", "the wrong order"],
)
def test_both_ends_log_why_their_secrets_do_not_match(
    theirs: Secrets,
    ours: Secrets,
    said: str,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
) -> None:
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING), protected(theirs, counters) as (_, port):
        with pytest.raises(PeerRefused) as reported:
            fetch_description(HOST, port, "prefill-0", "test", TIMEOUT_S, ours)
        assert time.monotonic() - started_s < TIMEOUT_S / 2
        wait_until(lambda: refused(counters) >= 1, "the listener counts it")
        wait_until(lambda: "side channel: refused" in caplog.text, "and says so")
    assert f"{HOST}:{port}" in str(reported.value)
    assert said in str(reported.value)
    assert VARIABLE in str(reported.value)
    for secret in (*theirs, *ours):
        assert secret.material.hex()[:8] not in f"{reported.value} {caplog.text}"


def ask_with(sock: zmq.Socket[bytes], port: int, keys: KeyPair) -> None:
    """Ask a listener whose first secret is `OLD` with these keys."""
    sock.disconnect(f"tcp://{HOST}:{port}")
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.CURVE_SERVERKEY, listener_keys(OLD).public)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
    sock.connect(f"tcp://{HOST}:{port}")
    sock.send_multipart([b"", HELLO])


def test_a_key_that_is_not_of_a_listed_secret_is_not_admitted(
    counters: Counters,
) -> None:
    """A peer that knows the listener's public key, but no secret."""
    other_peer = KeyPair.from_private_key(os.urandom(32))
    with protected((OLD, NEW), counters) as (listener, port), client(port) as sock:
        ask_with(sock, port, other_peer)
        wait_until(
            lambda: counters.total("side_channel_refusals", "other_secret") == 1,
            "it is refused",
        )
        assert sock.poll(0) == 0
        assert handshake(port, (OLD,)), "others are served"
        assert counters.total("handshakes_served") == 1
        assert listener.inbox.empty()


@contextlib.contextmanager
def impostor(keys: KeyPair | None) -> Iterator[tuple[int, list[bytes]]]:
    """Answers every peer with a good description, with these keys or in plain. Yields the messages it received."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
    port = sock.bind_to_random_port(f"tcp://{HOST}")
    reported: list[bytes] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            if sock.poll(20):
                client_id, *frames = sock.recv_multipart()
                reported.append(frames[-1])
                sock.send_multipart([client_id, b"", encode(make_description())])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port, reported
    finally:
        over.set()
        thread.join()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "kind", ["plain", "any keys", "keys of another secret", "the asker's keys"]
)
def test_an_impostor_of_the_listener_receives_nothing_and_its_answers_are_ignored(
    kind: str, counters: Counters
) -> None:
    keys = {
        "plain": None,
        "any keys": KeyPair.from_private_key(os.urandom(32)),
        "keys of another secret": listener_keys(OTHER),
        "the asker's keys": client_keys(OLD),
    }[kind]
    renewer = renewing(counters, (OLD, NEW))
    try:
        with impostor(keys) as (port, reported):
            with pytest.raises(PeerRefused):
                fetch_description(
                    HOST, port, "prefill-0", "test", TIMEOUT_S, (OLD, NEW)
                )
            renewer.submit([release_lease(port)])
            wait_until(
                lambda: counters.total("side_channel_errors") == 1,
                "the release is given up",
                TIMEOUT_S,
            )
            assert reported == []
    finally:
        renewer.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


RAW = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "noise": b"\xff" * 1000,
    "an older version": b"\x01\x00\x01\x00xxxx",
    "a plain greeting": GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    "a greeting and noise": GREETING
    + b"CURVE".ljust(20, b"\0")
    + bytes(32)
    + b"\x04\xc8\x05HELLO"
    + b"\xff" * 300,
    "half a greeting": GREETING,
}


@pytest.mark.parametrize("secrets", [(), (OLD, NEW)], ids=["plain", "secrets"])
def test_bytes_that_are_not_zmq_get_no_answer_and_stop_nothing(
    secrets: Secrets,
) -> None:
    with protected(secrets) as (listener, port):
        for payload in RAW.values():
            with socket.create_connection((HOST, port)) as raw:
                raw.sendall(payload)
        assert handshake(port, secrets)
        assert listener.inbox.empty()


def test_a_zmq_without_encryption_stops_the_start_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(private: bytes) -> bytes:
        raise zmq.ZMQError(errno.ENOTSUP)

    monkeypatch.setattr(zmq, "curve_public", without)
    with pytest.raises(InvalidSecretFile, match="CURVE"):
        RecordingListener(HOST, free_port(), Counters(), (Secret(os.urandom(32)),))
    with pytest.raises(InvalidSecretFile, match="CURVE"):
        renewing(Counters(), (Secret(os.urandom(32)),))
    assert not threads_named("kvferry-listener")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"1.0"],
        [b"", b"2.0", b"1", b"", b"", b"", b"CURVE", b"x"],
        [b"", b"1.0", b"1"],
        [b"\xff"] * 50,
    ],
    ids=str,
)
def test_a_malformed_zap_request_is_dropped_or_denied(
    frames: list[bytes], counters: Counters
) -> None:
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
