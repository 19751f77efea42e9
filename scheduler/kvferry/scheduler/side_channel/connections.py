"""Limits on the listener's connections: endless messages, too many connections, refusals.

ZMQ bounds the bytes of a frame and the number of queued messages, but not the frames of one message: it keeps all of
them until the last arrives. So the bytes that a connection has sent since its last whole message are read from the
system (`TCP_INFO`), and a connection that has sent too many is closed. When there are too many connections, the one
that has been silent for longest is closed: an engine connects again when needed, and the process needs its files.

Refused connections are counted and logged, with a rate limit.

ZMQ reports them on a monitor by file number. The peer's address can be read only while the connection exists, which is
not long for a refused one, so it may be missing in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket as sockets
import struct
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from kvferry.scheduler.state.counters import Counters

MAX_UNFINISHED_BYTES = 10 << 20
"""More than whole messages can have in flight: 8 of 256 KiB in ZMQ's queue, and 6 MiB in TCP's buffer. An empty frame
takes 2 bytes on the wire and 64 in ZMQ's memory, so a connection can cost 320 MiB at worst."""

LOOK_MS = 250
"""Interval of the check of all connections."""

MAX_CONNECTIONS = 8192
"""More than the workers of 1,000 engines of 8 that ask at the same time; half of the process's file limit if that is
less."""

_TCP_INFO = getattr(sockets, "TCP_INFO", None)
_INFO_BYTES = 136
_RECEIVED_AT = 128  # `tcpi_bytes_received` in Linux's `struct tcp_info`
_RECEIVED = struct.Struct("=Q")


@dataclass(slots=True)
class _Connection:
    """Attributes:
    before: bytes received up to the end of the last whole message.
    ends: its two addresses, since the file number may be reused by another connection.
    """

    before: int
    ends: tuple[Any, Any] | None


class UnfinishedMessages:
    """The connections of one listener, by file number; used by the listener's thread only.

    Where the system does not report the received bytes (not Linux), no connection is closed for endless messages.
    """

    def __init__(self) -> None:
        self.most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._known: dict[int, _Connection] = {}  # the latest to send is last

    def __len__(self) -> int:
        """The number of connections."""
        return len(self._known)

    def accepted(self, file: int) -> int | None:
        """Add a new connection. Returns the one that was closed for it, if any."""
        self._known.pop(file, None)
        self._known[file] = _Connection(0, _ends_of(file))
        if len(self._known) <= self.most:
            return None
        silent = next(iter(self._known))
        _end(silent, self._known.pop(silent).ends)
        return silent

    def delivered(self, file: int) -> None:
        """A whole message of it was received: reset its byte count."""
        connection = self._known.pop(file, None)
        if connection is not None:
            connection.before = _received(file)
            self._known[file] = connection

    def ended(self, file: int) -> None:
        """Remove a connection that has ended."""
        self._known.pop(file, None)

    def end_endless(self) -> int:
        """Close the connections that have sent too many bytes of one message. Returns how many."""
        endless = [x for x, one in self._known.items() if _received(x) - one.before > MAX_UNFINISHED_BYTES]
        return sum(_end(file, self._known.pop(file).ends) for file in endless)


def _end(file: int, ends: tuple[Any, Any] | None) -> bool:
    """Close the connection of this file if it still has these addresses: the number may have been reused. Returns
    whether it was closed."""
    with contextlib.suppress(OSError), _copy(file) as connection:
        if (connection.getsockname(), connection.getpeername()) == ends:
            connection.shutdown(sockets.SHUT_RDWR)
            return True
    return False


def _ends_of(file: int) -> tuple[Any, Any] | None:
    """Both addresses of a connection; None when it is gone."""
    with contextlib.suppress(OSError), _copy(file) as connection:
        return connection.getsockname(), connection.getpeername()
    return None


def _received(file: int) -> int:
    """Bytes received on a connection; 0 if unknown."""
    if _TCP_INFO is None:
        return 0
    with contextlib.suppress(OSError, struct.error), _copy(file) as connection:
        reported = connection.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        return int(_RECEIVED.unpack_from(reported, _RECEIVED_AT)[0])
    return 0


@contextlib.contextmanager
def _copy(file: int) -> Iterator[sockets.socket]:
    """A socket on a copy of ZMQ's file, which may be closed or reused by now."""
    copy = os.dup(file)
    try:
        connection = sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


logger = logging.getLogger(__name__)

QUIET_S = 1.0
UNFINISHED_QUIET_S = 60.0
"""Plain TCP probes look the same, so they are logged less often."""

_TEXTS = {
    "other_secret": "it has none of the secrets listed here",
    "one_sided": "only one of the two engines has a secret",
    "unfinished": "it ended the connection during the ZMQ handshake: a TCP probe, or an engine whose "
    "secrets do not match those here",
    "too_many": "there are too many connections, and this one was silent for longest",
}
REASONS = tuple(_TEXTS)

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT = struct.Struct("=HI")
_MOST_ADDRESSES = 4096


class Refusals:
    """Counts and logs the refused connections of one listener; used by the listener's thread only.

    Args:
        counters: counts `side_channel_refusals` by reason.
        unfinished: notified of new and ended connections.

    Attributes:
        monitor: to be polled; when it is readable, call `on_event`. None before `watch`.
    """

    def __init__(self, counters: Counters, unfinished: UnfinishedMessages) -> None:
        self.monitor: zmq.Socket[bytes] | None = None
        self._counters = counters
        self._unfinished = unfinished
        self._addresses: dict[int, str] = {}
        self._pending: str | None = None
        self._quiet_until_s: dict[str, float] = {}

    def watch(self, listener: zmq.Socket[bytes]) -> None:
        """Monitor this socket's connections. Call it before `bind`."""
        address = f"inproc://refusals-{uuid.uuid4().hex}"
        listener.monitor(address, _EVENTS)
        self.monitor = listener.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.connect(address)

    def on_event(self) -> None:
        """Process one event of the monitor."""
        if self.monitor is None:
            return
        try:
            event, value = _EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
        except (zmq.Again, struct.error):
            return
        if event == zmq.EVENT_ACCEPTED:
            self._remember(value)
            silent = self._unfinished.accepted(value)
            if silent is not None:
                self.refused("too_many", self._addresses.get(silent, ""))
        elif event == zmq.EVENT_DISCONNECTED:
            self._unfinished.ended(value)
            address, reason = self._addresses.pop(value, ""), self._pending
            self._pending = None
            if reason is not None:
                self.refused(reason, address)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._pending = "unfinished"
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._pending = "one_sided"
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._pending = "other_secret"
        else:
            self._pending = "unfinished"

    def refused(self, reason: str, address: str) -> None:
        """Count a refusal and log it, with a rate limit: any host that reaches the port could fill the disk."""
        self._counters.add("side_channel_refusals", reason)
        now_s = time.monotonic()
        if now_s < self._quiet_until_s.get(reason, 0.0):
            return
        quiet_s = UNFINISHED_QUIET_S if reason == "unfinished" else QUIET_S
        self._quiet_until_s[reason] = now_s + quiet_s
        who = address or "an unknown address"
        logger.warning(
            "side channel: refused %s (%s), similar lines omitted for %g s: %s", who, reason, quiet_s, _TEXTS[reason]
        )

    def close(self, listener: zmq.Socket[bytes]) -> None:
        """Stop the monitor. Its queue is emptied first: ZMQ's I/O thread may be blocked on it."""
        if self.monitor is None:
            return
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
        listener.disable_monitor()
        self.monitor.close()

    def _remember(self, file: int) -> None:
        if len(self._addresses) >= _MOST_ADDRESSES:
            self._addresses.pop(next(iter(self._addresses)))
        address = _peer_of(file)
        if address is not None:
            self._addresses[file] = address


def _peer_of(file: int) -> str | None:
    """The peer's address on ZMQ's file, which may be closed or reused by now."""
    try:
        copy = os.dup(file)
    except OSError:
        return None
    try:
        peer = sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with peer, contextlib.suppress(OSError, IndexError):
        return str(peer.getpeername()[0])
    return None
