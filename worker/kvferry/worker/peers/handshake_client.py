"""Fetches the description of a producer: one request, one answer, one deadline.

All handshakes of a worker share its ZMQ threads, so that none starts and ends threads of its own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Iterator

import zmq

from kvferry.protocol.errors import HandshakeFailed, PeerRefused
from kvferry.protocol.handshake import (
    MAX_REPLY_BYTES,
    EngineDescription,
    Hello,
    Refused,
    Reply,
    channel_address,
    decode_reply,
    encode,
)
from kvferry.protocol.side_channel.key_trials import KeyTrials, NextStep
from kvferry.protocol.side_channel.secrets import Secret, Secrets
from kvferry.protocol.side_channel.sockets import (
    CURVE_OVERHEAD_BYTES,
    keep_alive,
    protect_asker,
    read_event,
    watch_handshakes,
)

Context = zmq.Context[zmq.Socket[bytes]]


class AskingThreads:
    """The ZMQ threads of a worker's handshakes. Used by any number of threads.

    After `close` they end with the last handshake; `close` does not wait for it.
    """

    def __init__(self) -> None:
        self._context: Context | None = None
        self._users = 0
        self._is_closing = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the threads now, not with the first handshake."""
        with self._use() as context:
            context.socket(zmq.PAIR).close(linger=0)

    @contextlib.contextmanager
    def use(self, host: str) -> Iterator[Context]:
        """Context manager: a ZMQ context for a handshake with this host; close its sockets before leaving it.

        A host with a name gets threads of its own: ZMQ looks names up on its single I/O thread, and a slow name server
        would hold up the other handshakes.

        Raises:
            HandshakeFailed: the threads were closed.
        """
        with self._use() if _is_address(host) else own_threads() as context:
            yield context

    def close(self) -> None:
        """Let no further handshake begin. Idempotent."""
        with self._lock:
            self._is_closing = True
        self._end_unless_used()

    @contextlib.contextmanager
    def _use(self) -> Iterator[Context]:
        with self._lock:
            if self._is_closing:
                raise HandshakeFailed("this worker is closed")
            if self._context is None:
                self._context = zmq.Context(io_threads=1)
            context = self._context
            self._users += 1
        try:
            yield context
        finally:
            with self._lock:
                self._users -= 1
            self._end_unless_used()

    def _end_unless_used(self) -> None:
        with self._lock:
            if not self._is_closing or self._users:
                return
            context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)


@contextlib.contextmanager
def own_threads() -> Iterator[Context]:
    """Context manager: ZMQ threads for a single handshake."""
    context: Context = zmq.Context(io_threads=1)
    try:
        yield context
    finally:
        context.destroy(linger=0)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


_MS = 1000


def fetch_description(
    host: str,
    port: int,
    engine_id: str,
    asker: str,
    timeout_s: float,
    secrets: Secrets = (),
    threads: AskingThreads | None = None,
) -> EngineDescription:
    """Fetch the description of the engine that answers at an address.

    Args:
        threads: see `exchange`.

    Raises:
        PeerRefused: the answer was a refusal, or as `ask`.
        HandshakeFailed, InvalidMessage: as `ask`.
    """
    reply = ask(host, port, Hello(engine_id=engine_id, asker=asker), timeout_s, secrets, threads)
    if isinstance(reply, Refused):
        where = f"{host}:{port}"
        raise PeerRefused(f"{where} refused: {reply.field!r} is {reply.value!r}; expected {reply.expected!r}")
    return reply


def ask(
    host: str, port: int, hello: Hello, timeout_s: float, secrets: Secrets = (), threads: AskingThreads | None = None
) -> Reply:
    """Ask the engine that answers at an address; a refusal is an answer as well.

    Waits, so it runs on a thread that may wait; everything it makes is gone when it returns.

    Args:
        secrets: of the side channel, tried in their order; nothing is sent before one is accepted.
        threads: see `exchange`.

    Raises:
        HandshakeFailed: no answer came in time, or the address is invalid.
        PeerRefused: the secrets of both ends do not match; raised as soon as that is known.
        InvalidMessage: the answer is not one of the protocol's.
    """
    return decode_reply(exchange(host, port, encode(hello), timeout_s, secrets, threads))


def exchange(
    host: str, port: int, request: bytes, timeout_s: float, secrets: Secrets = (), threads: AskingThreads | None = None
) -> bytes:
    """Send one frame to a listener and return the one frame of its answer; neither is interpreted.

    Args:
        threads: ZMQ threads to use; None starts threads for this exchange only.

    Raises:
        HandshakeFailed, PeerRefused: as `ask`.
    """
    where = f"{host}:{port}"
    deadline_s = time.monotonic() + timeout_s
    try:
        with threads.use(host) if threads is not None else own_threads() as context:
            frames = _answer(context, host, port, request, KeyTrials(secrets), deadline_s)
    except zmq.Again:
        raise HandshakeFailed(f"{where} did not answer within {timeout_s:g} s") from None
    except (zmq.ZMQError, ValueError) as refused:
        raise HandshakeFailed(f"{where}: {refused}") from None
    if len(frames) != 1:
        raise HandshakeFailed(f"{where} answered in {len(frames)} frames; kvferry answers in one")
    return frames[0]


def _answer(
    context: Context, host: str, port: int, request: bytes, trials: KeyTrials, deadline_s: float
) -> list[bytes]:
    """The answer over a connection that was made with the listener's secret.

    The request waits in the socket from the start: ZMQ sends nothing before the other end has proved in its ZMTP
    handshake that it has the socket's secret.

    Raises:
        zmq.Again: the deadline has passed.
        PeerRefused: the listener accepts none of the secrets.
    """
    while True:
        socket, monitor = _connect(context, host, port, trials.secret)
        try:
            if trials.may_speak:
                socket.send(request, zmq.NOBLOCK)
            next_step = _wait_for_event(socket, monitor, trials, deadline_s)
            if next_step is NextStep.SPEAK:
                if not socket.poll(_left_ms(deadline_s)):
                    raise zmq.Again
                return socket.recv_multipart()
        finally:
            _close(socket, monitor)
        if next_step is NextStep.REFUSED:
            raise PeerRefused(f"{host}:{port} cannot be spoken to: {trials.why}")


def _wait_for_event(
    socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], trials: KeyTrials, deadline_s: float
) -> NextStep:
    """The next step; `SPEAK` as soon as an answer is there, even before its event.

    Raises:
        zmq.Again: the deadline has passed.
    """
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(_left_ms(deadline_s)))
        if socket in ready:
            return NextStep.SPEAK
        if monitor not in ready:
            raise zmq.Again
        event = read_event(monitor)
        next_step = NextStep.WAIT if event is None else trials.on_event(event)
        if next_step is not NextStep.WAIT:
            return next_step


def _connect(
    context: Context, host: str, port: int, secret: Secret | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    socket = context.socket(zmq.REQ)
    monitor: zmq.Socket[bytes] | None = None
    try:
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES + (CURVE_OVERHEAD_BYTES if secret is not None else 0))
        keep_alive(socket)
        protect_asker(socket, secret)
        monitor = watch_handshakes(socket)
        socket.connect(channel_address(host, port))
    except Exception:
        _close(socket, monitor)
        raise
    return socket, monitor


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
    if monitor is not None:
        socket.disable_monitor()
        monitor.close(linger=0)
    socket.close(linger=0)


def _left_ms(deadline_s: float) -> int:
    return max(0, int((deadline_s - time.monotonic()) * _MS))
