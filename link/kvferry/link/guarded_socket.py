"""A listening ZMQ ROUTER socket that any host may reach: the part that a listener needs whatever it serves.

Connections are authenticated where there are secrets, counted and bounded; messages of a wrong shape are counted and
dropped. No input raises. It belongs to one thread, which calls `poll` and `serve` in turn.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable

import zmq

from kvferry.link import limits
from kvferry.link.accepted_connections import (
    AcceptedConnections,
    AcceptedConnectionsSnapshot,
)
from kvferry.link.counters import Counters
from kvferry.link.curve_auth import CurveAuth
from kvferry.link.secrets import Secrets
from kvferry.link.sockets import derive_keys, listening_socket
from kvferry.protocol.handshake import channel_address
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


class GuardedSocket:
    """Receives requests of one frame each, and sends answers.

    Args:
        host, port: where to listen.
        max_bytes: of a request.
        secrets: the first is this listener's own; peers may have any of them. Without secrets every peer is served.
        counters: counts `bad_frames` and `side_channel_refusals`.
        on_request: called by `serve` with the peer's routing id, for `send`, and the request.

    Attributes:
        peer: the address from which the request came that `on_request` is called with.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        InvalidSecretFile: ZMQ has no CURVE.
    """

    def __init__(
        self,
        host: str,
        port: int,
        max_bytes: int,
        secrets: Secrets,
        counters: Counters,
        on_request: Callable[[bytes, bytes], None],
    ) -> None:
        derive_keys(secrets)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._counters = counters
        self._on_request = on_request
        self._bad_frames = RateLimitedLog(logger)
        self._check_again_s = 0.0
        self._is_skipping = False
        self.peer = ""
        self._file: int | None = None  # of the connection that brought the request
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._socket = listening_socket(self._context, host, max_bytes, secrets)
            self._connections = AcceptedConnections(self._socket, counters)
            undo.callback(self._connections.close)
            self._curve_auth: CurveAuth | None = None
            if secrets:
                self._curve_auth = CurveAuth(self._context, secrets, self._connections)
            self._socket.bind(channel_address(host, port))
            undo.pop_all()
        self._served: dict[zmq.Socket[bytes] | int, Callable[[], None]] = {
            self._socket: self._take_one,
            self._connections.monitor: self._connections.on_event,
            self._connections.arrivals.fileno(): self._end_endless,
        }
        if self._curve_auth is not None:
            self._served[self._curve_auth.socket] = self._curve_auth.answer
        self._poller = zmq.Poller()
        for served in self._served:
            self._poller.register(served, zmq.POLLIN)

    def snapshot(self) -> AcceptedConnectionsSnapshot:
        """Its connections now."""
        return self._connections.snapshot()

    def watch(self, file: int) -> None:
        """Let `poll` return when this file is readable, too."""
        self._poller.register(file, zmq.POLLIN)

    def poll(self, timeout_ms: int | None) -> set[zmq.Socket[bytes] | int]:
        """Wait until a socket or a file is readable, at most `timeout_ms`; returns those that are."""
        # While bytes arrive there is always something to check. So that file is left out until the next check is due.
        arrivals = self._connections.arrivals.fileno()
        rest_s = self._check_again_s - time.monotonic()
        if rest_s > 0:
            rest_ms = math.ceil(rest_s * 1000)
            if timeout_ms is None or timeout_ms > rest_ms:
                timeout_ms = rest_ms
            self._poller.register(arrivals, 0)
        else:
            self._poller.register(arrivals, zmq.POLLIN)
        return {socket for socket, _ in self._poller.poll(timeout_ms)}

    def serve(self, ready: set[zmq.Socket[bytes] | int]) -> None:
        """Process one message of each of its own sockets among these."""
        for socket, serve in self._served.items():
            if socket in ready:
                self.guarded(serve)

    def guarded(self, serve: Callable[[], None]) -> None:
        """Call a function whose exceptions must not end the thread: each is a bug, so its traceback is logged."""
        try:
            serve()
        except Exception:
            self._counters.add("bad_frames")
            logger.exception("side channel: a frame could not be served")

    def send(self, client_id: bytes, body: bytes) -> None:
        """Send an answer; it is dropped if the peer is gone or does not read."""
        try:
            self._socket.send_multipart([client_id, b"", body], flags=zmq.NOBLOCK)
        except zmq.ZMQError as refused:
            logger.debug("side channel: an answer could not be sent: %s", refused)

    def begin_contact(self) -> None:
        """The peer whose request is served connects to the agents, until its connection ends."""
        if self._file is not None:
            self._connections.begin_contact(self._file)

    def wait_for_contacts(self, timeout_s: float) -> bool:
        """Wait until no peer connects to the agents. May be called on another thread.

        Returns:
            False if the time was over before.
        """
        return self._connections.no_contact.wait(timeout_s)

    def bad_frame(self, what: str) -> None:
        """Count it and log it."""
        self._counters.add("bad_frames")
        self._bad_frames.warning("side channel: dropped %s", what)

    def close(self) -> None:
        """Close its sockets and free the port."""
        self._connections.close()
        self._context.destroy(linger=0)

    def _take_one(self) -> None:
        """Receive a message, or go on dropping the rest of one."""
        if self._is_skipping:
            self._skip()
            return
        peer = self._socket.recv(copy=False)
        envelope = self._socket.recv(copy=False)
        body = None
        if envelope.more:
            body = self._socket.recv(copy=False)
        if body is not None and body.more:
            self.bad_frame("a message of more than one frame")
            if self._skip():
                self._delivered(peer)
            else:
                self._end(peer)
            return
        self._delivered(peer)
        if body is None or len(envelope):
            self.bad_frame("a message without an envelope")
            return
        self.peer = str(body.get("Peer-Address"))
        self._on_request(peer.bytes, body.bytes)

    def _skip(self) -> bool:
        """Drop frames of a message for `SKIPPING_S`.

        Returns:
            Whether the message has ended.
        """
        # A message may have hundreds of thousands of empty frames, and ZMQ has all of them when it reports it
        # (`tcp.py`). Of a ROUTER they can only be dropped by receiving each, which takes a microsecond. So it is done
        # in turns, with the thread's other work between them. Received at once, 4.7 million frames took 30 s and 850
        # MB, and stopped the engine's thread for 1.4 s when they were freed.
        self._is_skipping = True
        until_s = time.monotonic() + limits.SKIPPING_S
        while True:
            for _ in range(limits.FRAMES_AT_ONCE):
                if not self._socket.recv(copy=False).more:
                    self._is_skipping = False
                    return True
            if time.monotonic() >= until_s:
                return False

    def _delivered(self, frame: zmq.Frame) -> None:
        self._file = None
        # ZMQ does not know the connection of every message.
        with contextlib.suppress(zmq.ZMQError):
            self._file = int(frame.get(zmq.SRCFD))
            self._connections.delivered(self._file)

    def _end(self, frame: zmq.Frame) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._connections.end(int(frame.get(zmq.SRCFD)))

    def _end_endless(self) -> None:
        self._check_again_s = time.monotonic() + limits.CHECK_INTERVAL_S
        for _ in range(self._connections.end_endless()):
            self.bad_frame("an endless message and its connection")
