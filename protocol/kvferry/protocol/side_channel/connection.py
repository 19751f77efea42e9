"""A connection to a listener, on an asyncio loop, and when to try again after one has failed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from kvferry.protocol.errors import ConnectionEnded, HandshakeFailed, NothingListens, PeerRefused
from kvferry.protocol.side_channel.hosts import Address, host_port
from kvferry.protocol.side_channel.secrets import VARIABLE, Secret, Secrets
from kvferry.protocol.side_channel.sockets import (
    ConnectionEvent,
    asking_socket,
    connection_event,
    unpack_event,
    watch,
)
from kvferry.protocol.side_channel.tcp import LOOK_S, RECEIVE_BUFFER_BYTES, Arrivals, TcpConnection

_TRIES_IN_PLAIN = 3
"""A restarting listener cuts a connection once; one that has a secret cuts it every time."""

_SPARE_BYTES = 4 * RECEIVE_BUFFER_BYTES
"""Bytes that a connection may bring beyond its longest answer: what is in TCP's buffer, and short answers behind it."""

T = TypeVar("T")


class EndlessMessages:
    """Looks at the connections of one client that bring bytes, at most every `LOOK_S`. Used on the client's loop."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._looks: dict[int, Callable[[], None]] = {}  # by file

    def begin(self) -> None:
        """Look at connections from now on."""
        asyncio.get_running_loop().add_reader(self._arrivals.fileno(), self._look)

    def add(self, file: int, look: Callable[[], None]) -> None:
        """Call this when the connection has brought bytes. ZMQ may have closed another one with this file number."""
        self._looks[file] = look
        self._arrivals.watch(file)

    def remove(self, file: int, look: Callable[[], None]) -> None:
        """The connection is closed; its file number may be another's already."""
        if self._looks.get(file) == look:
            del self._looks[file]

    def close(self) -> None:
        """Stop. Idempotent."""
        self._arrivals.close()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._arrivals.fileno())
        loop.call_later(LOOK_S, self.begin)
        for file in self._arrivals.take():
            look = self._looks.get(file)
            if look is not None:
                look()


class Connection:
    """Made by `open`, which returns once both ends have proved that they have the same secret, or both have none.

    Nothing is sent before that. One that has ended is of no more use. An endless message ends it, and so does one of
    several frames: ZMQ has all of them already (`tcp.py`), and frees them on a thread of its own when its socket is
    closed. (Received by Python, 11 million empty frames took the loop 27 s and 760 MB.)

    Args:
        file: its TCP connection's.
        max_answer_bytes: of a message that it brings.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        monitor: zmq.asyncio.Socket,
        file: int,
        max_answer_bytes: int,
        endless: EndlessMessages,
    ) -> None:
        self._socket = socket
        self._monitor = monitor
        # The same socket, for frames that have certainly arrived.
        self._frames: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._file = file
        self._tcp = TcpConnection(file)
        self._most_bytes = max_answer_bytes + _SPARE_BYTES
        self._ended = asyncio.ensure_future(
            monitor.recv_multipart()
        )  # after the handshake nothing else is reported
        self._endless = endless
        endless.add(file, self._end_endless)

    @property
    def has_ended(self) -> bool:
        """Whether the other end has closed it, or sent an endless message."""
        return self._ended.done()

    @classmethod
    async def open(
        cls,
        context: zmq.asyncio.Context,
        address: Address,
        port: int,
        secrets: Secrets,
        max_answer_bytes: int,
        endless: EndlessMessages,
        waits: bool,
    ) -> Connection:
        """Connect.

        | secrets listed here | tried | refused |
        | --- | --- | --- |
        | none | plain | when the listener has a secret |
        | A, B | A, then B, until one is accepted | when the listener has none, or others |

        The listener proves by CURVE that it has the secret, so the secret that is accepted is the right one. When none
        is, one more connection in plain, over which nothing is sent, shows whether it has no secret or another one.

        Args:
            max_answer_bytes: a longer answer ends the connection.
            waits: whether to wait for a listener as long as there is none.

        Raises:
            NothingListens: there is none, and it does not wait. A host that drops packets says nothing: who connects
                needs a deadline all the same.
            PeerRefused: the secrets of both ends do not match; the text names the reason and the remedy.
            HandshakeFailed: something else listens there.
            zmq.ZMQError: the address is none, or there are no more sockets.
        """
        for secret in secrets or (None,) * _TRIES_IN_PLAIN:
            opened = await cls._try(
                context, address, port, secret, max_answer_bytes, endless, waits
            )
            if isinstance(opened, Connection):
                return opened
            if opened is ConnectionEvent.ONE_SIDED:
                raise _listener_has_none() if secrets else _listener_has_one("has a secret")
            if opened is ConnectionEvent.GARBLED and not secrets:
                raise HandshakeFailed("does not keep to the protocol of ZMQ")
        if not secrets:
            raise _listener_has_one("cuts every connection, most likely because it has a secret")
        opened = await cls._try(context, address, port, None, max_answer_bytes, endless, waits)
        if isinstance(opened, Connection):
            opened.close()
            raise _listener_has_none()
        listed = ", ".join(secret.fingerprint for secret in secrets)
        raise PeerRefused(
            f"it has none of the secrets listed here ({listed}): let the files that {VARIABLE} names share one"
        )

    @classmethod
    async def _try(
        cls,
        context: zmq.asyncio.Context,
        address: Address,
        port: int,
        secret: Secret | None,
        max_answer_bytes: int,
        endless: EndlessMessages,
        waits: bool,
    ) -> Connection | ConnectionEvent:
        """The connection, or why there is none."""
        with contextlib.ExitStack() as undo:
            socket = asking_socket(context, address, secret, max_answer_bytes)
            undo.callback(socket.close, linger=0)
            monitor = watch(socket)
            undo.callback(_close_monitor, socket, monitor)
            socket.connect(f"tcp://{host_port(address, port)}")
            first, file = unpack_event(await monitor.recv_multipart())
            while first == zmq.EVENT_CONNECT_RETRIED:
                if not waits:
                    raise NothingListens(
                        "cannot be connected: nothing listens there, or it cannot be reached"
                    )
                first, file = unpack_event(await monitor.recv_multipart())
            event = connection_event(await monitor.recv_multipart())
            if event is not ConnectionEvent.THROUGH:
                return event
            undo.pop_all()
            return cls(socket, monitor, file, max_answer_bytes, endless)

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
            HandshakeFailed: the message has more or fewer frames than one; the connection is closed.
        """
        received = asyncio.ensure_future(self._socket.recv())
        try:
            await asyncio.wait((received, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if (
                received.done() and not self._socket.closed
            ):  # ZMQ reports a message before the end that came with it
                self._tcp.message_received()
                return self._body(received.result())
        finally:
            received.cancel()
        raise ConnectionEnded("has closed the connection")

    def close(self, linger_ms: int = 0) -> None:
        """Close it; messages in its queue have `linger_ms` to be sent. Idempotent."""
        self._ended.cancel()
        self._endless.remove(self._file, self._end_endless)
        if not self._socket.closed:
            _close_monitor(self._socket, self._monitor)
            self._socket.close(linger=linger_ms)

    def _end_endless(self) -> None:
        if self._tcp.unfinished_bytes() > self._most_bytes:
            self._tcp.shut_down()  # the monitor reports the end

    def _body(self, envelope: bytes) -> bytes:
        """The one frame after the envelope. All frames of a message arrive together."""
        body = self._frames.recv(copy=False) if self._frames.getsockopt(zmq.RCVMORE) else None
        if envelope or body is None or body.more:
            self.close()
            raise HandshakeFailed("answered in another number of frames than one")
        return body.bytes


async def within(timeout_s: float, coroutine: Coroutine[Any, Any, T], advice: str = "") -> T:
    """The coroutine's result. Raises `HandshakeFailed` when the time is over, with what may help in its text."""
    try:
        return await asyncio.wait_for(coroutine, timeout_s)
    except asyncio.TimeoutError:
        raise HandshakeFailed(f"did not answer within {timeout_s:g} s{advice}") from None


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


def _listener_has_none() -> PeerRefused:
    return PeerRefused(
        f"it has no secret, and there is one here: set {VARIABLE} there to a file with the same secret"
    )


def _listener_has_one(how: str) -> PeerRefused:
    return PeerRefused(
        f"it {how}, and there is none here: set {VARIABLE} here to a file with the same secret"
    )
