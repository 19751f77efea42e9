"""The side channel's ZMQ sockets at both ends: keep-alive, CURVE, the events of their monitors, and the bytes that
their TCP connections have brought.

With a secret, both ends authenticate each other: the key pairs of listener and client are derived from it, under
different labels. A client without the secret neither knows the listener's public key, which a handshake needs, nor has
a key pair that the listener admits. A false listener cannot answer.

ZMQ bounds the bytes of a frame and the number of queued messages, but not the frames of one message: it keeps all of
them until the last arrives, and hands them over together. An empty frame takes 2 bytes on the wire and 64 in ZMQ's
memory. So both ends of a side channel read from the system how many bytes a connection has brought (`TCP_INFO`), and
end one that has brought too many.

No option of ZMQ's releases bounds that: `ZMQ_IN_BATCH_SIZE` and the sockets without multipart messages are drafts,
which PyPI's pyzmq is built without.

Needs pyzmq.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import select
import socket
import struct
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq
from zmq.utils import z85

from kvferry.link import limits
from kvferry.link.secrets import VARIABLE, Secret, Secrets
from kvferry.protocol.errors import InvalidSecretFile
from kvferry.protocol.hosts import IpAddress

S = TypeVar("S", bound=zmq.Socket[Any])

ZAP_DOMAIN = b"kvferry"


_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_CONNECTION_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT = struct.Struct("=HI")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys of Curve25519, 32 bytes each."""

    public: bytes
    private: bytes = field(repr=False)

    @classmethod
    def from_private_key(cls, private: bytes) -> KeyPair:
        """The key pair of a private key.

        Raises:
            InvalidSecretFile: ZMQ was built without CURVE.
        """
        try:
            public = zmq.curve_public(z85.encode(private))
        except zmq.ZMQError as refused:
            expected = f"a pyzmq with CURVE, as that of PyPI is ({refused})"
            raise InvalidSecretFile(VARIABLE, "set", expected) from None
        return cls(z85.decode(public), private)


@functools.lru_cache(64)
def listener_keys(secret: Secret) -> KeyPair:
    """The key pair of a listener."""
    return KeyPair.from_private_key(secret.key(b"listener"))


@functools.lru_cache(64)
def client_keys(secret: Secret) -> KeyPair:
    """The key pair of a client."""
    # The label is a constant of the wire: with another one engines of two versions would have different keys.
    return KeyPair.from_private_key(secret.key(b"asker"))


def derive_keys(secrets: Secrets) -> None:
    """Called at the start, so that a ZMQ built without CURVE stops it.

    Raises:
        InvalidSecretFile: ZMQ was built without CURVE.
    """
    for secret in secrets:
        listener_keys(secret)
        client_keys(secret)


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Set TCP keep-alive."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, limits.KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, limits.KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, limits.KEEPALIVE_PROBES)


def listening_socket(
    context: zmq.Context[zmq.Socket[bytes]], host: str, max_bytes: int, secrets: Secrets
) -> zmq.Socket[bytes]:
    """A ROUTER that is ready to be bound, with bounded queues for peers that send too much or do not read.

    Args:
        max_bytes: of a frame, without the bytes that CURVE adds.
        secrets: it uses the first.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.MAXMSGSIZE, _with_overhead(max_bytes, bool(secrets)))
    socket.setsockopt(zmq.HANDSHAKE_IVL, limits.HANDSHAKE_MS)
    socket.setsockopt(zmq.RCVHWM, limits.REQUESTS_QUEUED)
    socket.setsockopt(zmq.SNDHWM, limits.ANSWERS_QUEUED)
    socket.setsockopt(zmq.RCVBUF, limits.RECEIVE_BUFFER_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    keep_alive(socket)
    if secrets:
        # ZAP decides which clients to admit (`CurveAuth`).
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, listener_keys(secrets[0]).private)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    return socket


def client_socket(
    context: zmq.Context[S],
    address: IpAddress,
    secret: Secret | None,
    max_answer_bytes: int,
) -> S:
    """A DEALER that is ready to be connected, with bounded queues.

    Args:
        address: of the listener.
        secret: the only listeners accepted are those with it; None for no encryption.
        max_answer_bytes: of a frame, without the bytes that CURVE adds.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, int(address.version == 6))
    socket.setsockopt(
        zmq.MAXMSGSIZE, _with_overhead(max_answer_bytes, secret is not None)
    )
    socket.setsockopt(zmq.SNDHWM, limits.QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, limits.RECEIVE_BUFFER_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, limits.MAX_RECONNECT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    keep_alive(socket)
    if secret is not None:
        keys = client_keys(secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, listener_keys(secret).public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
    return socket


def _with_overhead(max_bytes: int, is_encrypted: bool) -> int:
    return max_bytes + limits.CURVE_OVERHEAD_BYTES if is_encrypted else max_bytes


class ConnectionEvent(enum.Enum):
    """The result of a connection's ZMTP handshake, before any message."""

    THROUGH = enum.auto()
    ONE_SIDED = enum.auto()
    """One end has a secret and the other has none."""
    CUT = enum.auto()
    """The other end closed the connection, or does not admit this one: another secret, a secret at one end only, or no
    listener of this kind."""
    GARBLED = enum.auto()
    """The other end has another secret, or does not keep to ZMQ's protocol."""


def watch(socket: S, events: int = _CONNECTION_EVENTS) -> S:
    """A monitor, opened before `connect` or `bind`. Close it after `disable_monitor`.

    Args:
        events: of ZMQ; by default `EVENT_CONNECT_RETRIED` for every attempt that fails, `EVENT_CONNECTED`,
            whose value is the connection's file, and then those that `connection_event` knows.
    """
    address = f"inproc://monitor-{uuid.uuid4().hex}"
    socket.monitor(address, events)
    monitor: S = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def unpack_event(frames: list[bytes]) -> tuple[int, int]:
    """A monitor's message as ZMQ's event, and its value: a file, an errno or a protocol error."""
    event, value = _EVENT.unpack(frames[0])
    return event, value


def connection_event(frames: list[bytes]) -> ConnectionEvent:
    """The result of the handshake in a monitor's message."""
    event, value = unpack_event(frames)
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return ConnectionEvent.THROUGH
    if event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return ConnectionEvent.CUT
    if value == _MISMATCH:
        return ConnectionEvent.ONE_SIDED
    return ConnectionEvent.GARBLED


# The bytes of a message.


# `tcpi_bytes_received` in Linux's `struct tcp_info`.
_RECEIVED_AT = 128
_INFO_BYTES = 136

# `struct linger`: on, and for no time. The end of a connection is then a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


class TcpConnection:
    """A connection by its file number, as the monitor of a ZMQ socket reports it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._ends: tuple[Any, Any] | None = None
        self._finished_bytes = 0
        with contextlib.suppress(OSError), self._copy() as copy:
            self._ends = (copy.getsockname(), copy.getpeername())

    @property
    def peer(self) -> str:
        """The address of the other end; empty if the connection was gone before its address was read."""
        if self._ends is None:
            return ""
        _, peer = self._ends
        return str(peer[0])

    def message_received(self) -> None:
        """Count the bytes of the next message from here."""
        self._finished_bytes = self._received_bytes()

    def unfinished_bytes(self) -> int:
        """Bytes received since the last message; 0 or less if the connection is gone."""
        return self._received_bytes() - self._finished_bytes

    def shut_down(self) -> bool:
        """End it.

        Returns:
            Whether it was there.
        """
        with contextlib.suppress(OSError), self._copy() as copy:
            # ZMQ may have closed it, and another connection may have its file number by now.
            if (copy.getsockname(), copy.getpeername()) != self._ends:
                return False
            # ZMQ sees the end and closes its file, which resets the connection. Without a reset the sender would wait
            # for a minute.
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            copy.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def _received_bytes(self) -> int:
        with contextlib.suppress(OSError), self._copy() as copy:
            reported = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            return int.from_bytes(reported[_RECEIVED_AT:], sys.byteorder)
        return 0

    @contextlib.contextmanager
    def _copy(self) -> Iterator[socket.socket]:
        """A socket on a copy of ZMQ's file."""
        # A copy, since a Python socket closes its file.
        file = os.dup(self._file)
        try:
            connection = socket.socket(fileno=file)
        except OSError:
            os.close(file)
            raise
        with connection:
            yield connection


class Arrivals:
    """Reports which of many connections have brought bytes. Silent connections cost nothing."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """A file that is readable when there is something to `take`."""
        return self._epoll.fileno()

    def watch(self, file: int) -> None:
        """Report this connection whenever it has brought bytes, until ZMQ closes it."""
        # These are ZMQ's own files. ZMQ's thread may have read the bytes before this epoll is asked, which then reports
        # nothing to read. With edges of both kinds it does: a connection that can be written to is reported when bytes
        # come, whoever reads them.
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        with contextlib.suppress(OSError):  # ZMQ has closed it already
            self._epoll.register(file, events)

    def take(self) -> list[int]:
        """The connections that have brought bytes since the last call, and perhaps others."""
        return [file for file, _ in self._epoll.poll(0)]

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        self._epoll.close()
