"""A listening ZMQ ROUTER socket that any host may reach: the part that a listener needs whatever it serves.

Connections are authenticated where there are secrets, counted and bounded; messages of a wrong shape are counted and
dropped. No input raises. It belongs to one thread, which calls `poll` and `serve` in turn.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import zmq

from kvferry.protocol.handshake import channel_address
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.protocol.side_channel.sockets import derive_keys, listening_socket
from kvferry.scheduler.side_channel.connections import LOOK_MS, Connections
from kvferry.scheduler.side_channel.curve_auth import CurveAuth
from kvferry.scheduler.state import Counters

logger = logging.getLogger(__name__)


class GuardedSocket:
    """Receives requests of one frame each, and sends answers.

    Args:
        host, port: where to listen.
        max_bytes: of a request.
        secrets: the first is this listener's own; peers may have any of them. Without secrets every peer is served.
        counters: counts `bad_frames` and `side_channel_refusals`.
        on_request: called by `serve` with the peer's routing id, for `send`, and the request.

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
        self._look_again_s = 0.0
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._socket = listening_socket(self._context, host, max_bytes, secrets)
            self._connections = Connections(self._socket, counters)
            undo.callback(self._connections.close)
            self._curve_auth = CurveAuth(self._context, secrets, self._connections) if secrets else None
            self._socket.bind(channel_address(host, port))
            undo.pop_all()
        self._served: dict[zmq.Socket[bytes], Callable[[], None]] = {
            self._socket: self._take_one,
            self._connections.monitor: self._connections.on_event,
        }
        if self._curve_auth is not None:
            self._served[self._curve_auth.socket] = self._curve_auth.answer
        self._poller = zmq.Poller()
        for socket in self._served:
            self._poller.register(socket, zmq.POLLIN)

    def watch(self, file: int) -> None:
        """Let `poll` return when this file is readable, too."""
        self._poller.register(file, zmq.POLLIN)

    def poll(self, timeout_ms: int | None) -> set[zmq.Socket[bytes] | int]:
        """Wait until a socket or a file is readable, at most `timeout_ms`; returns those that are."""
        times_ms = [timeout_ms] if timeout_ms is not None else []
        if self._connections:
            times_ms.append(LOOK_MS)
        return {socket for socket, _ in self._poller.poll(min(times_ms, default=None))}

    def serve(self, ready: set[zmq.Socket[bytes] | int]) -> None:
        """Process one message of each of its own sockets among these."""
        for socket, serve in self._served.items():
            if socket in ready:
                self.guarded(serve)
        self.guarded(self._end_endless)

    def guarded(self, serve: Callable[[], None]) -> None:
        """Call a function whose exceptions must not end the thread: each is a bug, so its traceback is logged."""
        try:
            serve()
        except Exception:
            self._counters.add("bad_frames")
            logger.exception("side channel: a frame could not be served")

    def send(self, asker: bytes, body: bytes) -> None:
        """Send an answer; it is dropped if the peer is gone or does not read."""
        try:
            self._socket.send_multipart([asker, b"", body], flags=zmq.NOBLOCK)
        except zmq.ZMQError as refused:
            logger.debug("side channel: an answer could not be sent: %s", refused)

    def bad_frame(self, what: str) -> None:
        """Count it and log it."""
        self._counters.add("bad_frames")
        self._bad_frames.warning("side channel: dropped %s", what)

    def close(self) -> None:
        """Close its sockets and free the port."""
        self._connections.close()
        self._context.destroy(linger=0)

    def _take_one(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        with contextlib.suppress(zmq.ZMQError):  # ZMQ does not know the connection of every message
            self._connections.delivered(int(frames[0].get(zmq.SRCFD)))
        if len(frames) != 3 or len(frames[1]):
            self.bad_frame(f"a message of {len(frames)} frames")
            return
        self._on_request(frames[0].bytes, frames[2].bytes)

    def _end_endless(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._look_again_s:
            self._look_again_s = now_s + LOOK_MS / 1000
            for _ in range(self._connections.end_endless()):
                self.bad_frame("an endless message and its connection")
