"""A connection to a listener, on an asyncio loop, and when to try again after one has failed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from kvferry.protocol.errors import ConnectionEnded, HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import channel_address
from kvferry.protocol.side_channel.secrets import VARIABLE, Secret, Secrets
from kvferry.protocol.side_channel.sockets import ConnectionEvent, asking_socket, connection_event, unpack_event, watch
from kvferry.protocol.side_channel.tcp import TcpConnection

_TRIES_IN_PLAIN = 3
"""A restarting listener cuts a connection once; one that has a secret cuts it every time."""

_SPARE_BYTES = 8 << 20
"""Bytes that a connection may bring beyond its longest answer: 6 MiB in TCP's buffer, and what is in ZMQ's queue. An
empty frame takes 2 bytes on the wire and 64 in ZMQ's memory, so a handshake can cost 2.3 GiB at worst."""

_LOOK_S = 0.5
"""Interval of the check for an endless message."""

T = TypeVar("T")


class Connection:
    """Made by `open`, which returns once both ends have proved that they have the same secret, or both have none.

    Nothing is sent before that. One that has ended is of no more use. An endless message ends it.

    Args:
        file: its TCP connection's.
        max_answer_bytes: of a message that it brings.
    """

    def __init__(
        self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, file: int, max_answer_bytes: int
    ) -> None:
        self._socket, self._monitor = socket, monitor
        self._tcp = TcpConnection(file)
        self._most_bytes = max_answer_bytes + _SPARE_BYTES
        self._ended = asyncio.ensure_future(monitor.recv_multipart())  # after the handshake nothing else is reported
        self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._end_endless)

    @property
    def has_ended(self) -> bool:
        """Whether the other end has closed it, or sent an endless message."""
        return self._ended.done()

    @classmethod
    async def open(
        cls, context: zmq.asyncio.Context, address: str, port: int, secrets: Secrets, max_answer_bytes: int
    ) -> Connection:
        """Connect, and wait for a listener as long as there is none.

        | secrets listed here | tried | refused |
        | --- | --- | --- |
        | none | plain | when the listener has a secret |
        | A, B | A, then B, until one is accepted | when the listener has none, or others |

        The listener proves by CURVE that it has the secret, so the secret that is accepted is the right one. When none
        is, one more connection in plain, over which nothing is sent, shows whether it has no secret or another one.

        Args:
            max_answer_bytes: a longer answer ends the connection.

        Raises:
            PeerRefused: the secrets of both ends do not match; the text names the reason and the remedy.
            HandshakeFailed: something else listens there.
            zmq.ZMQError: the address is none, or there are no more sockets.
        """
        for secret in secrets or (None,) * _TRIES_IN_PLAIN:
            opened = await cls._try(context, address, port, secret, max_answer_bytes)
            if isinstance(opened, Connection):
                return opened
            if opened is ConnectionEvent.ONE_SIDED:
                raise _listener_has_none() if secrets else _listener_has_one("has a secret")
            if opened is ConnectionEvent.GARBLED and not secrets:
                raise HandshakeFailed("does not keep to the protocol of ZMQ")
        if not secrets:
            raise _listener_has_one("cuts every connection, most likely because it has a secret")
        opened = await cls._try(context, address, port, None, max_answer_bytes)
        if isinstance(opened, Connection):
            opened.close()
            raise _listener_has_none()
        listed = ", ".join(secret.fingerprint for secret in secrets)
        raise PeerRefused(
            f"it has none of the secrets listed here ({listed}): let the files that {VARIABLE} names share one"
        )

    @classmethod
    async def _try(
        cls, context: zmq.asyncio.Context, address: str, port: int, secret: Secret | None, max_answer_bytes: int
    ) -> Connection | ConnectionEvent:
        """The connection, or why there is none."""
        with contextlib.ExitStack() as undo:
            socket = asking_socket(context, address, secret, max_answer_bytes)
            undo.callback(socket.close, linger=0)
            monitor = watch(socket)
            undo.callback(_close_monitor, socket, monitor)
            socket.connect(channel_address(address, port))
            _, file = unpack_event(await monitor.recv_multipart())  # `EVENT_CONNECTED` comes first
            event = connection_event(await monitor.recv_multipart())
            if event is not ConnectionEvent.THROUGH:
                return event
            undo.pop_all()
            return cls(socket, monitor, file, max_answer_bytes)

    def close_at_end(self) -> None:
        """Close it as soon as it has ended, for a connection that only sends: ZMQ would connect again."""
        self._ended.add_done_callback(lambda _: self.close())

    async def send(self, frame: bytes) -> None:
        """Send one message; never waits. Raises `HandshakeFailed` if too many wait in its queue."""
        try:
            await self._socket.send_multipart([b"", frame], flags=zmq.NOBLOCK)
        except zmq.ZMQError as full:
            raise HandshakeFailed(f"takes no messages: {full}") from None

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            ConnectionEnded: it has ended before one came.
            HandshakeFailed: the message has more or fewer frames than one.
        """
        received = asyncio.ensure_future(self._socket.recv_multipart())
        try:
            await asyncio.wait((received, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if received.done():  # ZMQ reports a message before the end that came with it
                self._tcp.message_received()
                return _body(received.result())
        finally:
            received.cancel()
        raise ConnectionEnded("has closed the connection")

    def close(self, linger_ms: int = 0) -> None:
        """Close it; messages in its queue have `linger_ms` to be sent. Idempotent."""
        self._ended.cancel()
        self._look.cancel()
        if not self._socket.closed:
            _close_monitor(self._socket, self._monitor)
            self._socket.close(linger=linger_ms)

    def _end_endless(self) -> None:
        if self._tcp.unfinished_bytes() > self._most_bytes:
            self._tcp.shut_down()  # the monitor reports the end
            return
        self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._end_endless)


async def within(timeout_s: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Raises `HandshakeFailed` when the time is over."""
    try:
        return await asyncio.wait_for(coroutine, timeout_s)
    except asyncio.TimeoutError:
        raise HandshakeFailed(f"did not answer within {timeout_s:g} s") from None


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """The delay before the next attempt: doubled after every consecutive failure, and jittered so that the engines of a
    fleet do not retry at the same time.

    Args:
        failures: consecutive failures so far, at least 1.
        first_s, longest_s: bounds before the jitter of up to ±50 %.
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 64)) * random.uniform(0.5, 1.5)  # noqa: S311


def _close_monitor(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)


def _body(frames: list[bytes]) -> bytes:
    if len(frames) != 2 or frames[0]:
        raise HandshakeFailed(f"answered in {len(frames) - 1} frames; kvferry answers in one")
    return frames[1]


def _listener_has_none() -> PeerRefused:
    return PeerRefused(f"it has no secret, and there is one here: set {VARIABLE} there to a file with the same secret")


def _listener_has_one(how: str) -> PeerRefused:
    return PeerRefused(f"it {how}, and there is none here: set {VARIABLE} here to a file with the same secret")
