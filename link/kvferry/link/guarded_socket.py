"""A listening ZMQ ROUTER socket that any host may reach: the part that a listener needs whatever it serves.

Connections are authenticated where there are secrets, counted and bounded; messages of a wrong shape are counted and
dropped. No input raises. It belongs to one thread, which calls `poll` and `serve` in turn. Three kinds of connections
are closed:

| closed | when |
| --- | --- |
| a connection that has sent too many bytes since its last whole message (`sockets.py`) | it is checked next |
| the largest connection of the host that has sent most | all together have sent too many such bytes |
| the connection that has been silent for longest | there are too many connections |

ZMQ reports connections on a monitor, by file number, and sends a ZAP request (RFC 27) for each that is to be
authenticated, over a socket inside the process.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq

from kvferry.link import limits
from kvferry.link.counters import Counters
from kvferry.link.secrets import Secrets
from kvferry.link.sockets import (
    ZAP_DOMAIN,
    Arrivals,
    TcpConnection,
    client_keys,
    derive_keys,
    listening_socket,
    unpack_event,
    watch,
)
from kvferry.protocol.handshake import MAX_REQUEST_BYTES, zmq_address
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
        self._bugs = RateLimitedLog(logger)
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
            self._socket.bind(zmq_address(host, port))
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
        """Call a function whose exceptions must not end the thread: each is a bug, so a traceback is logged."""
        try:
            serve()
        except Exception:  # noqa: BLE001 - shown, with its traceback
            self._counters.add("bad_frames")
            self._bugs.exception("side channel: a frame could not be served")

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
        # (`sockets.py`). Of a ROUTER they can only be dropped by receiving each, which takes a microsecond. So it is
        # done in turns, with the thread's other work between them. Received at once, 4.7 million frames took 30 s and
        # 850 MB, and stopped the engine's thread for 1.4 s when they were freed.
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


# Its connections.


# More than whole messages can have in flight: those in ZMQ's queue, one that waits to enter it, and what is in TCP's
# buffer. Of empty frames it is 40 MB in ZMQ's memory. Not among the limits, which `kvferry doctor` reads where msgspec,
# and so the messages, are missing.
MAX_UNFINISHED_BYTES = (
    limits.REQUESTS_QUEUED + 1
) * MAX_REQUEST_BYTES + 4 * limits.RECEIVE_BUFFER_BYTES
"""Most bytes of one connection of a listener since its last whole message."""

_TEXTS = {
    "other_secret": "it has none of the secrets listed here",
    "one_sided": "only one of the two engines has a secret",
    "unfinished": "it ended the connection during the ZMQ handshake: a TCP probe, or an engine whose "
    "secrets do not match those here",
    "too_many": "there are too many connections, and this one was silent for longest",
}
REASONS = tuple(_TEXTS)
_REASON_OF_ERROR: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one_sided",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "other_secret",
}

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class AcceptedConnectionsSnapshot:
    """The connections at one moment.

    Attributes:
        capacity: connections that are kept.
        unfinished_bytes: of each connection's message that has not arrived whole, by its file; the latest to send is
            last.
    """

    capacity: int
    unfinished_bytes: Mapping[int, int]


class AcceptedConnections:
    """Used by the listener's thread only.

    Args:
        listener: not bound yet.
        counters: counts `side_channel_refusals` by reason.

    Attributes:
        monitor: to be polled; when it is readable, call `on_event`.
        arrivals: to be polled; when it is readable, call `end_endless`, at most every `CHECK_INTERVAL_S`.
        capacity: connections that are kept.
        no_contact: set while no connection is one of a peer that connects to the agents.
    """

    def __init__(self, listener: zmq.Socket[bytes], counters: Counters) -> None:
        self.capacity = limits.MAX_CONNECTIONS
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # No limit is -1: every connection would be one too many.
        if files != resource.RLIM_INFINITY:
            # The process needs files for other things, too.
            self.capacity = min(self.capacity, files // 2)
        self._listener = listener
        self._counters = counters
        # By file; the latest to send is last.
        self._known: dict[int, TcpConnection] = {}
        self.arrivals = Arrivals()
        # By file, when it was last checked.
        self._unfinished_bytes: dict[int, int] = {}
        # By file.
        self._contacts: set[int] = set()
        self.no_contact = threading.Event()
        self.no_contact.set()
        self._reason: str | None = None
        self._logs = {
            reason: RateLimitedLog(logger, limits.LINE_S) for reason in _TEXTS
        }
        self._logs["unfinished"] = RateLimitedLog(logger, limits.UNFINISHED_LINE_S)
        self.monitor = watch(listener, _EVENTS)

    def snapshot(self) -> AcceptedConnectionsSnapshot:
        """The connections now. May be called on another thread while the listener's waits."""
        known = dict(self._known)
        return AcceptedConnectionsSnapshot(
            capacity=self.capacity,
            unfinished_bytes={
                file: tcp.unfinished_bytes() for file, tcp in known.items()
            },
        )

    def on_event(self) -> None:
        """Process one event of the monitor."""
        event, value = unpack_event(self.monitor.recv_multipart())
        if event == zmq.EVENT_ACCEPTED:
            self.accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._ended(value)
        else:
            # A failed handshake: its event has no file, and comes before the end of its connection, which has one.
            self._reason = _REASON_OF_ERROR.get(value, "unfinished")

    def _ended(self, file: int) -> None:
        connection = self._forget(file)
        reason = self._reason
        self._reason = None
        if reason is not None:
            # ZMQ closes a refused connection so soon that its peer's address may be missing.
            peer = connection.peer if connection is not None else ""
            self.refused(reason, peer)

    def accepted(self, file: int) -> None:
        """Add a new connection, in place of the one that was silent for longest if there are too many."""
        self._forget(file)
        self._known[file] = TcpConnection(file)
        self.arrivals.watch(file)
        if len(self._known) > self.capacity:
            # An engine whose connection this was connects again when it needs one.
            silent_file, silent = next(iter(self._known.items()))
            self.end(silent_file)
            self.refused("too_many", silent.peer)

    def delivered(self, file: int) -> None:
        """A whole message of it was received: reset its byte count."""
        self._unfinished_bytes.pop(file, None)
        connection = self._known.pop(file, None)
        if connection is not None:
            connection.message_received()
            self._known[file] = connection

    def begin_contact(self, file: int) -> None:
        """Its peer connects to the agents, until this connection ends."""
        # Its beginning may still be in the monitor's queue, and the end of the one that had its number before.
        while self.monitor.poll(0):
            self.on_event()
        if file in self._known:
            self._contacts.add(file)
            self.no_contact.clear()

    def end(self, file: int) -> bool:
        """Close a connection.

        Returns:
            Whether it was there.
        """
        connection = self._forget(file)
        return connection is not None and connection.shut_down()

    def end_endless(self) -> int:
        """Check the connections that have sent bytes, and close those with too many bytes of one message.

        Returns:
            How many were closed.
        """
        for file in self.arrivals.take():
            if file in self._known:
                self._unfinished_bytes[file] = self._known[file].unfinished_bytes()
        num_ended = 0
        for file, unfinished in list(self._unfinished_bytes.items()):
            if unfinished > MAX_UNFINISHED_BYTES:
                num_ended += self.end(file)
        if sum(self._unfinished_bytes.values()) > limits.MAX_UNFINISHED_IN_ALL_BYTES:
            num_ended += self._end_largest()
        return num_ended

    def _end_largest(self) -> int:
        """Close the largest connection of the host with the most bytes, until those of all are few enough.

        Returns:
            How many were closed.
        """
        # By host: at first the largest connection of all was closed. With a thousand connections of one host, 17 KiB on
        # each, every longer request of another host then cost its connection.
        total_bytes = sum(self._unfinished_bytes.values())
        files_of_host: dict[str, list[int]] = {}  # the largest is last
        bytes_of_host: Counter[str] = Counter()
        for file in sorted(
            self._unfinished_bytes, key=self._unfinished_bytes.__getitem__
        ):
            host = self._known[file].peer
            files_of_host.setdefault(host, []).append(file)
            bytes_of_host[host] += self._unfinished_bytes[file]
        hosts = [(-host_bytes, host) for host, host_bytes in bytes_of_host.items()]
        heapq.heapify(hosts)  # negated, so that the host with the most bytes is first
        num_ended = 0
        while total_bytes > limits.MAX_UNFINISHED_IN_ALL_BYTES:
            negated_bytes, host = heapq.heappop(hosts)
            file = files_of_host[host].pop()
            unfinished = self._unfinished_bytes[file]
            total_bytes -= unfinished
            num_ended += self.end(file)
            heapq.heappush(hosts, (negated_bytes + unfinished, host))
        return num_ended

    def _forget(self, file: int) -> TcpConnection | None:
        self._unfinished_bytes.pop(file, None)
        self._contacts.discard(file)
        if not self._contacts:
            self.no_contact.set()
        return self._known.pop(file, None)

    def refused(self, reason: str, peer: str) -> None:
        """Count a refusal and log it."""
        self._counters.add("side_channel_refusals", reason)
        who = peer or "an unknown address"
        self._logs[reason].warning(
            "side channel: refused %s (%s): %s", who, reason, _TEXTS[reason]
        )

    def close(self) -> None:
        """Stop the monitor."""
        # Its queue is emptied first: ZMQ's I/O thread may be blocked on it.
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
        self._listener.disable_monitor()
        self.monitor.close()
        self.arrivals.close()


# Their authentication.


_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
# ROUTER identity, an empty frame, version, request id, domain, address, identity, mechanism, CURVE public key.
_REQUEST_FRAMES = 9
_HEADER_FRAMES = 4
"""Those without which a request cannot be answered."""
_ADDRESS_AT = 5

_OK = (b"200", b"OK")
_REFUSED = (b"400", b"no such key")


class CurveAuth:
    """Admits connections whose key derives from one of the listed secrets.

    Args:
        context: of the listener's socket, which must be bound after this object is created.

    Attributes:
        socket: to be polled; when it is readable, call `answer`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secrets: Secrets,
        connections: AcceptedConnections,
    ) -> None:
        self._admitted = frozenset(client_keys(secret).public for secret in secrets)
        self._connections = connections
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Receive one request and answer it. A malformed one is dropped; its connection ends without an answer."""
        frames = self.socket.recv_multipart()
        if len(frames) < _HEADER_FRAMES:
            return
        identity, delimiter, version, request_id = frames[:_HEADER_FRAMES]
        if delimiter or version != _VERSION:
            return
        status = _OK
        if not self._admits(frames):
            status = _REFUSED
            address = b""
            if len(frames) > _ADDRESS_AT:
                address = frames[_ADDRESS_AT]
            self._connections.refused(
                "other_secret", address.decode("ascii", "replace")
            )
        self.socket.send_multipart(
            [identity, b"", _VERSION, request_id, *status, b"", b""]
        )

    def _admits(self, frames: list[bytes]) -> bool:
        if len(frames) != _REQUEST_FRAMES:
            return False
        _, _, _, _, domain, _, _, mechanism, key = frames
        return domain == ZAP_DOMAIN and mechanism == b"CURVE" and key in self._admitted
