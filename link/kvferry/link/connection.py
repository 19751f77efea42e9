"""A connection to a listener, on an asyncio loop.

ZMQ's sockets are used without `zmq.asyncio`, where each message took a future or two: without them, and without a task
for each message, a query takes half of the processor time (`bench.link`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import zmq

from kvferry.link import limits
from kvferry.link.secrets import VARIABLE, Secret, Secrets
from kvferry.link.sockets import (
    Arrivals,
    ConnectionEvent,
    TcpConnection,
    client_socket,
    connection_event,
    unpack_event,
    watch,
)
from kvferry.protocol.errors import (
    ConnectionEnded,
    HandshakeFailed,
    NothingListens,
    PeerRefused,
)
from kvferry.protocol.hosts import IpAddress, host_port

T = TypeVar("T")

OnFrame = Callable[[bytes], None]


class EndlessMessages:
    """Checks the connections of one client that bring bytes, at most every `CHECK_INTERVAL_S`.

    Used on the client's loop. `sockets.py` says why ZMQ does not bound a message itself.
    """

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._checks: dict[int, Callable[[], None]] = {}  # by file

    def begin(self) -> None:
        """Check connections from now on."""
        asyncio.get_running_loop().add_reader(
            self._arrivals.fileno(), self._check_arrivals
        )

    def add(self, file: int, check: Callable[[], None]) -> None:
        """Call `check` whenever the connection has brought bytes."""
        # ZMQ may have closed another connection with this file number: its check is replaced.
        self._checks[file] = check
        self._arrivals.watch(file)

    def remove(self, file: int, check: Callable[[], None]) -> None:
        """The connection is closed."""
        # Its file number may be another connection's already.
        if self._checks.get(file) == check:
            del self._checks[file]

    def close(self) -> None:
        """Stop. Idempotent."""
        self._arrivals.close()

    def _check_arrivals(self) -> None:
        loop = asyncio.get_running_loop()
        # Not again at once: while bytes arrive there is always something to check.
        loop.remove_reader(self._arrivals.fileno())
        loop.call_later(limits.CHECK_INTERVAL_S, self.begin)
        for file in self._arrivals.take():
            check = self._checks.get(file)
            if check is not None:
                check()


class Connection:
    """Made by `open`, which returns once both ends have proved that they have the same secret, or both have none.

    Nothing is sent before that. A connection that has ended is of no more use. An endless message ends it, and so does
    a message of several frames.

    Args:
        file: its TCP connection's.

    Attributes:
        max_answer_bytes: of a message that it brings; a longer one ends it.
        ended: its result says why the connection has ended.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        file: int,
        max_answer_bytes: int,
        endless: EndlessMessages,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._monitor = monitor
        self._file = file
        self._tcp = TcpConnection(file)
        self.max_answer_bytes = max_answer_bytes
        self.ended: asyncio.Future[HandshakeFailed] = self._loop.create_future()
        self._on_frame: OnFrame | None = None
        self._endless = endless
        endless.add(file, self._end_endless)
        self._reads_soon = False
        self._loop.add_reader(socket.fileno(), self._on_readable)
        self._loop.add_reader(monitor.fileno(), self._check_monitor)
        # ZMQ's files are readable once for what may be many events, and that once may have been before.
        self._check_monitor()

    @classmethod
    async def open(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        address: IpAddress,
        port: int,
        *,
        secrets: Secrets,
        max_answer_bytes: int,
        endless: EndlessMessages,
        waits: bool,
    ) -> Connection:
        """Connect.

        | secrets listed here | attempts | refused |
        | --- | --- | --- |
        | none | without encryption | when the listener has a secret |
        | A, B | with A, then with B, until one is accepted | when the listener has none, or others |

        Args:
            max_answer_bytes: a longer answer ends the connection.
            waits: whether to wait for a listener as long as there is none.

        Raises:
            NothingListens: there is none, and it does not wait. A host that drops packets says nothing: the caller
                needs a deadline as well.
            PeerRefused: the secrets of both ends do not match; the text names the reason and the remedy.
            HandshakeFailed: something else listens there.
            zmq.ZMQError: the address is none, or there are no more sockets.
        """

        attempt = functools.partial(
            cls._attempt, context, address, port, max_answer_bytes, endless, waits
        )
        # The listener proves by CURVE that it has the secret, so the secret that is accepted is the right one.
        for secret in secrets or (None,) * limits.ATTEMPTS:
            result = await attempt(secret)
            if isinstance(result, Connection):
                return result
            if result is ConnectionEvent.ONE_SIDED:
                raise (
                    _listener_has_none()
                    if secrets
                    else _listener_has_one("has a secret")
                )
            if result is ConnectionEvent.GARBLED and not secrets:
                raise HandshakeFailed("does not speak ZMQ's protocol")
        if not secrets:
            raise _listener_has_one(
                "cuts every connection, most likely because it has a secret"
            )
        # One more connection without encryption, over which nothing is sent, tells a listener without a secret from one
        # with another secret: an operator has to mend different things.
        result = await attempt(None)
        if isinstance(result, Connection):
            result.close()
            raise _listener_has_none()
        listed = ", ".join(secret.fingerprint for secret in secrets)
        raise PeerRefused(
            f"it has none of the secrets listed here ({listed}): let the files that {VARIABLE} names share one"
        )

    @classmethod
    async def _attempt(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        address: IpAddress,
        port: int,
        max_answer_bytes: int,
        endless: EndlessMessages,
        waits: bool,
        secret: Secret | None,
    ) -> Connection | ConnectionEvent:
        """The connection, or why there is none."""
        with contextlib.ExitStack() as undo:
            socket = client_socket(context, address, secret, max_answer_bytes)
            undo.callback(socket.close, linger=0)
            monitor = watch(socket)
            undo.callback(_close_monitor, socket, monitor)
            socket.connect(f"tcp://{host_port(address, port)}")
            while True:
                event, file = unpack_event(await _next_event(monitor))
                if event != zmq.EVENT_CONNECT_RETRIED:
                    break
                if not waits:
                    raise NothingListens(
                        "cannot be connected: nothing listens there, or it cannot be reached"
                    )
            result = connection_event(await _next_event(monitor))
            if result is not ConnectionEvent.THROUGH:
                return result
            undo.pop_all()
            return cls(socket, monitor, file, max_answer_bytes, endless)

    def send(self, frame: bytes) -> None:
        """Send one message; never waits.

        Raises:
            HandshakeFailed: too many messages wait in its queue, or it is closed.
        """
        try:
            self._socket.send_multipart([b"", frame], flags=zmq.NOBLOCK)
        except zmq.ZMQError as full:
            raise HandshakeFailed(f"takes no messages: {full}") from None
        # Sending may take the sign that a message has arrived.
        if self._on_frame is not None and _has_arrived(self._socket):
            self._read_soon()

    def receive_all(self, on_frame: OnFrame) -> None:
        """Pass every message to `on_frame` from now on, on the loop."""
        self._on_frame = on_frame
        self._read_soon()

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            ConnectionEnded: it has ended before one came.
            HandshakeFailed: the message has more or fewer frames than one, or is too long; the connection is closed.
        """
        received: asyncio.Future[bytes] = self._loop.create_future()

        def on_frame(frame: bytes) -> None:
            self._on_frame = None
            received.set_result(frame)

        self._on_frame = on_frame
        try:
            self._read()
            await asyncio.wait(
                (received, self.ended), return_when=asyncio.FIRST_COMPLETED
            )
            if received.done():
                return received.result()
        finally:
            self._on_frame = None
        raise self.ended.result()

    def close(self, linger_ms: int = 0) -> None:
        """Close it; messages in its queue have `linger_ms` to be sent. Idempotent."""
        self._endless.remove(self._file, self._end_endless)
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            _close_monitor(self._socket, self._monitor)
            self._socket.close(linger=linger_ms)
        if not self.ended.done():
            self.ended.set_result(ConnectionEnded("was closed here"))

    def end(self, why: HandshakeFailed) -> None:
        """Close it because of what the other end has done."""
        if not self.ended.done():
            self.ended.set_result(why)
        # Otherwise ZMQ would connect again by itself.
        self.close()

    def _check_monitor(self) -> None:
        # After the handshake the monitor reports nothing but the connection's end.
        if self._socket.closed or not _has_arrived(self._monitor):
            return
        # The messages first: ZMQ reports them before the end that came with them.
        self._read()
        self.end(ConnectionEnded("has closed the connection"))

    def _end_endless(self) -> None:
        if self._tcp.unfinished_bytes() > self.max_answer_bytes + limits.SPARE_BYTES:
            self._tcp.shut_down()  # the monitor reports the end

    def _on_readable(self) -> None:
        if not self._reads_soon:
            self._read()

    def _read_soon(self) -> None:
        # Once a turn. Its file may be readable in each, and each time there was one reading more in all later turns.
        if not self._reads_soon:
            self._reads_soon = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._reads_soon = False
        self._read()

    def _read(self) -> None:
        """Pass on messages that have arrived, while somebody takes them."""
        num_bytes = 0
        for _ in range(limits.MESSAGES_AT_ONCE):
            # Asked in any case: ZMQ's file stays readable until then, and the loop would run without a pause.
            if (
                self._socket.closed
                or not _has_arrived(self._socket)
                or self._on_frame is None
            ):
                return
            try:
                frame = self._next_frame()
            except HandshakeFailed as refused:
                self.end(refused)
                return
            self._on_frame(frame)
            num_bytes += len(frame)
            if num_bytes >= limits.BYTES_AT_ONCE:
                break
        # Then again, after the loop's other work: a peer that answers without end must not hold it up.
        self._read_soon()

    def _next_frame(self) -> bytes:
        """The one frame after the envelope."""
        envelope = self._socket.recv(zmq.NOBLOCK)
        # All frames of a message arrive together, so this does not wait.
        body = None
        if self._socket.get(zmq.RCVMORE):
            body = self._socket.recv(zmq.NOBLOCK, copy=False)
        self._tcp.message_received()
        if envelope or body is None or body.more:
            # More frames are not received: ZMQ has all of them already, and frees them on a thread of its own when its
            # socket is closed. Received by Python, 11 million empty frames took the loop 27 s and 760 MB.
            raise HandshakeFailed("answered in another number of frames than one")
        if len(body) > self.max_answer_bytes:
            raise HandshakeFailed(
                f"answered {len(body)} bytes, where {self.max_answer_bytes} at most were expected"
            )
        return body.bytes


def _has_arrived(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive."""
    # Asked each time: ZMQ's file is readable once for what may be many messages.
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


async def _next_event(monitor: zmq.Socket[bytes]) -> list[bytes]:
    """The next message of a monitor."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(monitor.fileno(), is_readable.set)
    try:
        while not _has_arrived(monitor):
            is_readable.clear()
            await is_readable.wait()
    finally:
        loop.remove_reader(monitor.fileno())
    return monitor.recv_multipart(zmq.NOBLOCK)


async def within(
    timeout_s: float, coroutine: Coroutine[Any, Any, T], advice: str = ""
) -> T:
    """The coroutine's result.

    Args:
        advice: what may help, for the error.

    Raises:
        HandshakeFailed: there is no result in time.
    """
    try:
        return await asyncio.wait_for(coroutine, timeout_s)
    except asyncio.TimeoutError:
        raise HandshakeFailed(
            f"did not answer within {timeout_s:g} s{advice}"
        ) from None


def _close_monitor(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
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
