"""A connection to a listener, on an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from kvferry.protocol.errors import ConnectionEnded, HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import channel_address
from kvferry.protocol.side_channel.key_trials import KeyTrials, NextStep
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import ConnectionEvent, asking_socket, connection_event, watch

T = TypeVar("T")


class Connection:
    """Made by `open`, which returns once both ends have proved that they have the same secret, or both have none.

    Nothing is sent before that. A connection that has ended is of no more use: messages may have been lost with it.
    """

    def __init__(self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        self._socket, self._monitor = socket, monitor
        self._ended = asyncio.ensure_future(_watch_end(monitor))

    @classmethod
    async def open(
        cls, context: zmq.asyncio.Context, address: str, port: int, secrets: Secrets, max_answer_bytes: int
    ) -> Connection:
        """Connect, and try the secrets in their order; waits for a listener as long as there is none.

        Args:
            max_answer_bytes: a longer answer ends the connection.

        Raises:
            PeerRefused: the secrets of both ends do not match.
            zmq.ZMQError: the address is none, or there are no more sockets.
        """
        trials = KeyTrials(secrets)
        while True:
            with contextlib.ExitStack() as undo:
                socket = asking_socket(context, address, trials.secret, max_answer_bytes)
                undo.callback(socket.close, linger=0)
                monitor = watch(socket)
                undo.callback(_close_monitor, socket, monitor)
                socket.connect(channel_address(address, port))
                next_step = await _next_step(monitor, trials)
                if next_step is NextStep.SPEAK:
                    undo.pop_all()
                    return cls(socket, monitor)
            if next_step is NextStep.REFUSED:
                raise PeerRefused(trials.why)

    @property
    def has_ended(self) -> bool:
        """Whether the other end has closed it."""
        return self._ended.done()

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
                return _body(received.result())
        finally:
            received.cancel()
        raise ConnectionEnded("has closed the connection")

    def close(self, linger_ms: int = 0) -> None:
        """Close it; messages in its queue have `linger_ms` to be sent. Idempotent."""
        self._ended.cancel()
        if not self._socket.closed:
            _close_monitor(self._socket, self._monitor)
            self._socket.close(linger=linger_ms)


async def within(timeout_s: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Raises `HandshakeFailed` when the time is over."""
    try:
        return await asyncio.wait_for(coroutine, timeout_s)
    except asyncio.TimeoutError:
        raise HandshakeFailed(f"did not answer within {timeout_s:g} s") from None


async def _next_step(monitor: zmq.asyncio.Socket, trials: KeyTrials) -> NextStep:
    next_step = NextStep.WAIT
    while next_step is NextStep.WAIT:
        event = connection_event(await monitor.recv_multipart())
        if event is not ConnectionEvent.ENDED:  # the end of an attempt; its result came before
            next_step = trials.on_event(event)
    return next_step


async def _watch_end(monitor: zmq.asyncio.Socket) -> None:
    while connection_event(await monitor.recv_multipart()) is not ConnectionEvent.ENDED:
        pass


def _close_monitor(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)


def _body(frames: list[bytes]) -> bytes:
    if len(frames) != 2 or frames[0]:
        raise HandshakeFailed(f"answered in {len(frames) - 1} frames; kvferry answers in one")
    return frames[1]
