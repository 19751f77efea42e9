"""Options of the side channel's ZMQ sockets at both ends: keep-alive, CURVE, and the events of their monitors.

With a secret, both ends authenticate each other: the key pairs of listener and client are derived from it, under
different labels. A client without the secret neither knows the listener's public key, which a handshake needs, nor has
a key pair that the listener admits. A false listener cannot answer.

Needs pyzmq.
"""

from __future__ import annotations

import enum
import functools
import struct
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq
from zmq.utils import z85

from kvferry.link import limits
from kvferry.link.secrets import VARIABLE, Secret, Secrets
from kvferry.protocol.errors import InvalidSecretFile
from kvferry.protocol.hosts import Address

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
        # ZAP decides which clients to admit (`curve_auth.py`).
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, listener_keys(secrets[0]).private)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    return socket


def client_socket(
    context: zmq.Context[S],
    address: Address,
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
