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

import pytest
import zmq

from kvferry.protocol.errors import HandshakeFailed, InvalidSecretFile, KvferryError, PeerRefused
from kvferry.protocol.handshake import (
    MAX_REQUEST_BYTES,
    Hello,
    LeaseName,
    Refused,
    Release,
    Renew,
    decode_reply,
    encode,
)
from kvferry.protocol.side_channel.secrets import VARIABLE, Secret, Secrets
from kvferry.protocol.side_channel.sockets import KeyPair, asker_keys, listener_keys, protect_asker
from kvferry.scheduler.consumer.remote_lease import ReleaseLease, RemoteLease, RenewLease
from kvferry.scheduler.side_channel import connections as refusals
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.state.counters import Counters
from tests.harness.handshake import fetch_description
from tests.protocol.samples import BOOT, make_description
from tests.protocol.secret_files import NEW, OLD, OTHER
from tests.scheduler.channel import HOST, client, cpu_share, free_port, threads_named
from tests.scheduler.recording_listener import RecordingListener
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
"""Every refusal must come long before it."""

HELLO = encode(Hello(engine_id="prefill-0", asker="test"))
NAME = LeaseName(slot=1, epoch=f"{2:015x}")
LISTS: list[Secrets] = [(), (OLD,), (NEW,), (OLD, NEW), (NEW, OLD), (OTHER, NEW)]


@contextlib.contextmanager
def listening(secrets: Secrets, counters: Counters | None = None) -> Iterator[tuple[RecordingListener, int]]:
    port = free_port()
    listener = RecordingListener(HOST, port, counters or Counters(), secrets)
    try:
        listener.publish(make_description())
        yield listener, port
    finally:
        listener.close()


def handshake(port: int, secrets: Secrets) -> bool:
    """Whether it succeeds; a refusal must be a typed error."""
    try:
        return fetch_description(HOST, port, "prefill-0", "test", TIMEOUT_S, secrets) == make_description()
    except PeerRefused:
        return False


def go_together(theirs: Secrets, ours: Secrets) -> bool:
    """Whether the listener's first secret is among those listed here, as the documentation requires."""
    return theirs[0] in ours if theirs else not ours


def refused(counters: Counters) -> int:
    return sum(counters.total("side_channel_refusals", reason) for reason in refusals.REASONS)


def release_lease(port: int) -> ReleaseLease:
    return ReleaseLease(RemoteLease(HOST, port, BOOT, NAME, 3600.0))


@pytest.mark.parametrize("theirs", LISTS)
@pytest.mark.parametrize("ours", LISTS)
def test_engines_speak_if_the_listeners_first_secret_is_listed_by_the_asker(theirs: Secrets, ours: Secrets) -> None:
    """Handshakes and releases alike; a refusal comes before the deadline."""
    counters = Counters()
    renewer = LeaseRenewer(counters, ours)
    started_s = time.monotonic()
    try:
        with listening(theirs) as (listener, port):
            assert handshake(port, ours) == go_together(theirs, ours)
            renewer.submit([release_lease(port)])
            if go_together(theirs, ours):
                assert listener.inbox.get(timeout=TIMEOUT_S) == Release(boot=BOOT, leases=(NAME,))
                assert counters.total("side_channel_errors") == 0
            else:
                wait_until(lambda: counters.total("side_channel_errors") == 1, "the lost message is counted", TIMEOUT_S)
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
        ((OLD, NEW), (NEW, OTHER), f"none of the secrets listed here ({NEW.fingerprint}, {OTHER.fingerprint})"),
    ],
    ids=["missing", "superfluous", "another", "the wrong order"],
)
def test_both_ends_log_why_their_secrets_do_not_match(
    theirs: Secrets, ours: Secrets, said: str, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING), listening(theirs, counters) as (_, port):
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


def test_the_listener_names_the_address_that_it_refused(
    counters: Counters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection may be gone before its address is asked for: then the next one is named."""
    monkeypatch.setattr(refusals, "QUIET_S", 0.0)
    with caplog.at_level(logging.WARNING), listening((OLD,), counters) as (_, port):

        def named() -> bool:
            handshake(port, (NEW,))
            return f"refused {HOST} (other_secret)" in caplog.text

        wait_until(named, "the address is named", TIMEOUT_S)
    assert counters.total("side_channel_refusals", "other_secret") >= 1


def test_many_refusals_are_all_counted_and_few_are_logged(counters: Counters, caplog: pytest.LogCaptureFixture) -> None:
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING), listening((OLD,), counters) as (_, port):
        for _ in range(20):
            handshake(port, (NEW,))
        wait_until(lambda: counters.total("side_channel_refusals", "other_secret") >= 20, "all are counted")
    lines = [record for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) <= 3 * (1 + time.monotonic() - started_s)


def test_a_key_that_is_not_of_a_listed_secret_is_not_admitted(counters: Counters) -> None:
    """A peer that knows the listener's public key, but no secret."""
    other_peer = KeyPair.of(os.urandom(32))
    with listening((OLD, NEW), counters) as (listener, port), client(port) as sock:
        sock.disconnect(f"tcp://{HOST}:{port}")
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.CURVE_SERVERKEY, listener_keys(OLD).public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, other_peer.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, other_peer.private)
        sock.connect(f"tcp://{HOST}:{port}")
        sock.send_multipart([b"", HELLO])
        wait_until(lambda: counters.total("side_channel_refusals", "other_secret") == 1, "it is refused")
        assert sock.poll(0) == 0
        assert handshake(port, (OLD,)), "others are served"
        assert counters.total("handshakes_served") == 1
        assert listener.inbox.empty()


@pytest.mark.parametrize("second", [OLD, NEW])
def test_an_asker_with_any_listed_secret_is_admitted(second: Secret) -> None:
    """The asker's own pair may be of either secret: ZAP admits the keys of all that are listed."""
    with listening((OLD, NEW)) as (_, port), client(port) as sock:
        sock.disconnect(f"tcp://{HOST}:{port}")
        sock.setsockopt(zmq.CURVE_SERVERKEY, listener_keys(OLD).public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, asker_keys(second).public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, asker_keys(second).private)
        sock.connect(f"tcp://{HOST}:{port}")
        sock.send_multipart([b"", HELLO])
        assert decode_reply(sock.recv_multipart()[1]) == make_description()


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
                asker, *frames = sock.recv_multipart()
                reported.append(frames[-1])
                sock.send_multipart([asker, b"", encode(make_description())])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port, reported
    finally:
        over.set()
        thread.join()
        context.destroy(linger=0)


@pytest.mark.parametrize("kind", ["plain", "any keys", "keys of another secret", "the asker's keys"])
def test_an_impostor_of_the_listener_receives_nothing_and_its_answers_are_ignored(
    kind: str, counters: Counters
) -> None:
    keys = {
        "plain": None,
        "any keys": KeyPair.of(os.urandom(32)),
        "keys of another secret": listener_keys(OTHER),
        "the asker's keys": asker_keys(OLD),
    }[kind]
    renewer = LeaseRenewer(counters, (OLD, NEW))
    try:
        with impostor(keys) as (port, reported):
            with pytest.raises(PeerRefused):
                fetch_description(HOST, port, "prefill-0", "test", TIMEOUT_S, (OLD, NEW))
            renewer.submit([release_lease(port)])
            wait_until(lambda: counters.total("side_channel_errors") == 1, "the release is given up", TIMEOUT_S)
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
    "a greeting and noise": GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + b"\xff" * 300,
    "half a greeting": GREETING,
}


@pytest.mark.parametrize("secrets", [(), (OLD, NEW)], ids=["plain", "secrets"])
def test_bytes_that_are_not_zmq_get_no_answer_and_stop_nothing(secrets: Secrets) -> None:
    with listening(secrets) as (listener, port):
        for payload in RAW.values():
            with socket.create_connection((HOST, port)) as raw:
                raw.sendall(payload)
        assert handshake(port, secrets)
        assert listener.inbox.empty()


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER], ids=["as NixlConnector asks", "dealer"])
def test_a_plain_client_gets_no_answer_from_a_listener_with_a_secret(kind: int, counters: Counters) -> None:
    with listening((OLD,), counters) as (listener, port), client(port, kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        for frame in (HELLO, encode(Renew(boot=BOOT, leases=(NAME,)))):
            sock.send_multipart([frame] if kind == zmq.REQ else [b"", frame])
            if kind == zmq.REQ:
                break
        wait_until(lambda: refused(counters) >= 1, "it is refused", TIMEOUT_S)
        assert sock.poll(200) == 0
        assert listener.inbox.empty()
        assert counters.total("handshakes_served") == counters.total("bad_frames") == 0


def test_a_silent_server_takes_the_deadline_and_no_more() -> None:
    with socket.create_server((HOST, 0)) as silent:
        started_s = time.monotonic()
        with pytest.raises(HandshakeFailed, match=r"did not answer within 0\.3 s"):
            fetch_description(HOST, silent.getsockname()[1], "prefill-0", "test", 0.3, (OLD, NEW))
        assert time.monotonic() - started_s < 5.0


def test_the_greatest_message_fits_with_encryption_around_it_and_one_more_byte_does_not() -> None:
    with listening((OLD,)) as (_, port), client(port) as sock:
        sock.disconnect(f"tcp://{HOST}:{port}")
        protect_asker(sock, OLD)
        sock.connect(f"tcp://{HOST}:{port}")
        for size in (MAX_REQUEST_BYTES, MAX_REQUEST_BYTES + 1):
            sock.send_multipart([b"", bytes(size)])
            assert isinstance(decode_reply(sock.recv_multipart()[1]), Refused)
        sock.setsockopt(zmq.LINGER, 0)
        sock.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1000)])
        assert sock.poll(300) == 0
        assert handshake(port, (OLD,))


def test_renewals_go_on_over_the_second_secret(counters: Counters) -> None:
    """The first renewal finds the secret out, the others need not."""
    renewer = LeaseRenewer(counters, (OLD, NEW))
    try:
        listened = Counters()
        with listening((NEW,), listened) as (listener, port):
            renewer.submit([RenewLease(RemoteLease(HOST, port, BOOT, NAME, 0.3), at_once=True)])
            for _ in range(5):
                assert listener.inbox.get(timeout=TIMEOUT_S) == Renew(boot=BOOT, leases=(NAME,))
        assert refused(listened) == 1
        assert counters.total("side_channel_errors") == 0
    finally:
        renewer.close()


def test_everything_is_sent_before_closing_although_the_first_secret_is_another(counters: Counters) -> None:
    with listening((NEW,)) as (listener, port):
        renewer = LeaseRenewer(counters, (OLD, NEW))
        renewer.submit(
            ReleaseLease(RemoteLease(HOST, port, BOOT, LeaseName(slot=n, epoch=NAME.epoch), 9.0)) for n in range(30)
        )
        renewer.close()
        assert [listener.inbox.get(timeout=TIMEOUT_S).leases[0].slot for _ in range(30)] == list(range(30))


def test_an_engine_that_restarts_with_the_next_secret_is_renewed_again(counters: Counters) -> None:
    port = free_port()
    renewer = LeaseRenewer(counters, (OLD, NEW))
    try:
        for secret, boot in ((OLD, BOOT), (NEW, "f" * 32)):
            listener = RecordingListener(HOST, port, Counters(), (secret,))
            try:
                renewer.submit([RenewLease(RemoteLease(HOST, port, boot, NAME, 0.3), at_once=True)])
                wait_until(lambda hears=listener: not hears.inbox.empty(), f"a renewal for {boot}", TIMEOUT_S)  # type: ignore[misc]
            finally:
                listener.close()
    finally:
        renewer.close()


def test_a_producer_that_answers_renewals_at_length_loses_the_connection_and_fills_no_memory(
    counters: Counters,
) -> None:
    """Such answers are never read: they would stay in memory for ever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    producer = context.socket(zmq.ROUTER)
    producer.setsockopt(zmq.RCVTIMEO, 30_000)
    ended = producer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    renewer = LeaseRenewer(counters)
    try:
        renewer.submit([release_lease(producer.bind_to_random_port(f"tcp://{HOST}"))])
        asker, *_ = producer.recv_multipart()
        producer.send_multipart([asker, b"", bytes(1 << 20)])
        assert ended.poll(30_000)
    finally:
        renewer.close()
        context.destroy(linger=0)


def connections(port: int) -> list[socket.socket]:
    """Copies of this process's own connections with this port at either end."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(int(file)))
            if copy.family is socket.AF_INET and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(copy)
            else:
                copy.close()
    there = [each for each in found if port in (each.getsockname()[1], each.getpeername()[1])]
    for each in found:
        if each not in there:
            each.close()
    return there


def test_the_kernel_keeps_watch_over_idle_connections_at_both_ends(counters: Counters) -> None:
    renewer = LeaseRenewer(counters, (OLD,))
    try:
        with listening((OLD,)) as (listener, port):
            renewer.submit([release_lease(port)])
            listener.inbox.get(timeout=TIMEOUT_S)
            both = connections(port)
            for end in both:
                with end:
                    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert len(both) == 2
    finally:
        renewer.close()


def test_a_zmq_without_encryption_stops_the_start_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(private: bytes) -> bytes:
        raise zmq.ZMQError(errno.ENOTSUP)

    monkeypatch.setattr(zmq, "curve_public", without)
    with pytest.raises(InvalidSecretFile, match="CURVE"):
        RecordingListener(HOST, free_port(), Counters(), (Secret(os.urandom(32)),))
    with pytest.raises(InvalidSecretFile, match="CURVE"):
        LeaseRenewer(Counters(), (Secret(os.urandom(32)),))
    assert not threads_named("kvferry-listener")


def test_a_producer_without_the_secret_delays_no_other(counters: Counters) -> None:
    renewer = LeaseRenewer(counters, (OLD, NEW))
    try:
        with (
            listening((OTHER,)) as (_, wrong),
            listening((), Counters()) as (_, plain),
            listening((NEW,)) as (good, port),
        ):
            for number, where in enumerate([wrong, plain] * 10):
                renewer.submit(
                    [RenewLease(RemoteLease(HOST, where, BOOT, LeaseName(slot=number, epoch=NAME.epoch), 0.06))]
                )
            lease_s = 3.0
            renewer.submit([RenewLease(RemoteLease(HOST, port, BOOT, NAME, lease_s))])
            for _ in range(3):
                before_s = time.monotonic()
                assert isinstance(good.inbox.get(timeout=TIMEOUT_S), Renew)
                assert time.monotonic() - before_s < lease_s, "the lease would have expired"
        assert counters.total("side_channel_errors") > 0
    finally:
        renewer.close()


def test_an_exception_in_curve_auth_does_not_stop_the_listener(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening((OLD,), counters) as (listener, port):
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
    with listening((OLD,), counters) as (listener, port):
        sock = listener._socket._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect("inproc://zeromq.zap.01")
        sock.send_multipart(frames or [b""])
        assert handshake(port, (OLD,))
        while sock.poll(0):
            assert b"200" not in sock.recv_multipart()
        sock.close()
        assert counters.total("bad_frames") == 0


def test_closing_with_secrets_frees_the_port_and_all_threads_and_files() -> None:
    def alive() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before, port = alive(), free_port()
    for _ in range(5):
        listener = RecordingListener(HOST, port, Counters(), (OLD, NEW))
        listener.publish(make_description())
        assert handshake(port, (NEW, OLD))
        assert not handshake(port, (OTHER,))
        listener.close()
    assert not threads_named("kvferry-listener")
    wait_until(lambda: alive() <= before, "all is given back")


def test_idle_with_secrets_it_uses_no_processor_time(counters: Counters) -> None:
    renewer = LeaseRenewer(counters, (OLD, NEW))
    try:
        with listening((NEW,)) as (listener, port):
            renewer.submit([release_lease(port)])
            listener.inbox.get(timeout=TIMEOUT_S)
            assert min(cpu_share(0.5) for _ in range(3)) < 0.02
    finally:
        renewer.close()
