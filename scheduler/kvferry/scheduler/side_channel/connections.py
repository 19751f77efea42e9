"""Connections that send a message without an end, or are too many.

ZMQ bounds the bytes of a frame and the messages that wait, but not the frames of one message: it keeps all of them
until the last has come. So the bytes that a connection has sent since its last whole message are counted, by asking
the system, and a connection that has sent too many is ended. So is, when there are too many, the one that has said
nothing for longest: an engine connects anew when it has something to say, and its process has files for other things.

Connections to a listener that came to nothing are counted, and named in the log at most once in a while.

ZMQ tells of them on a monitor, by the number of the connection's file. The address behind that can be asked for only
while the connection lives, which one that is refused does not do for long: it is told when it was caught in time.
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
"""More than all that can be under way in whole messages: 8 of them in ZMQ's queue, 256 KiB each, and 6 MiB in TCP's
buffer. An empty frame has 2 bytes on the way and 64 in ZMQ's memory, so a connection can cost 320 MiB at worst."""

LOOK_MS = 250
"""How often connections are looked at."""

MAX_CONNECTIONS = 8192
"""More than the workers of 1,000 engines of 8 that ask in the same moment; or half of the files that the process may
have, if that is less."""

_TCP_INFO = getattr(sockets, "TCP_INFO", None)
_INFO_BYTES = 136
_RECEIVED_AT = 128  # `tcpi_bytes_received` in Linux's `struct tcp_info`
_RECEIVED = struct.Struct("=Q")


@dataclass(slots=True)
class _Connection:
    """Attributes:
    before: bytes received up to the end of the last whole message.
    ends: its two addresses; the file's number may be another connection's one day.
    """

    before: int
    ends: tuple[Any, Any] | None


class UnfinishedMessages:
    """The connections of one listener, by the number of their file in this process; belongs to the listener's thread.

    Where the system does not tell what a connection has received (it is not Linux), nothing is ended.
    """

    def __init__(self) -> None:
        self.most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._known: dict[int, _Connection] = {}  # the one that said something last is last

    def __len__(self) -> int:
        """Connections."""
        return len(self._known)

    def accepted(self, file: int) -> int | None:
        """There is a new connection. Returns which one had to give way, if any."""
        self._known.pop(file, None)
        self._known[file] = _Connection(0, _ends_of(file))
        if len(self._known) <= self.most:
            return None
        silent = next(iter(self._known))
        _end(silent, self._known.pop(silent).ends)
        return silent

    def delivered(self, file: int) -> None:
        """A whole message of it has been taken: what it sent before counts no more."""
        connection = self._known.pop(file, None)
        if connection is not None:
            connection.before = _received(file)
            self._known[file] = connection

    def ended(self, file: int) -> None:
        """The connection is gone."""
        self._known.pop(file, None)

    def end_endless(self) -> int:
        """End the connections that have sent too much of one message. Returns how many."""
        endless = [x for x, one in self._known.items() if _received(x) - one.before > MAX_UNFINISHED_BYTES]
        return sum(_end(file, self._known.pop(file).ends) for file in endless)


def _end(file: int, ends: tuple[Any, Any] | None) -> bool:
    """End the connection between these addresses, whatever the file's number stands for by now. Returns whether it was
    still there."""
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
    """Bytes that a connection has received; 0 where nobody knows."""
    if _TCP_INFO is None:
        return 0
    with contextlib.suppress(OSError, struct.error), _copy(file) as connection:
        reported = connection.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        return int(_RECEIVED.unpack_from(reported, _RECEIVED_AT)[0])
    return 0


@contextlib.contextmanager
def _copy(file: int) -> Iterator[sockets.socket]:
    """A connection that belongs to ZMQ and may be closed by now; its file number may even be another's."""
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
"""A plain TCP probe ends like this as well, so these are not worth a line each."""

_TEXTS = {
    "other_secret": "it has none of the secrets listed here",
    "one_sided": "only one of the two engines has a secret",
    "unfinished": "it ended the connection before it had said who it is: a TCP probe, or an engine whose "
    "secrets do not go with those here",
    "too_many": "there are too many connections, and the one that was silent for longest gives way",
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
    """Of one listener; belongs to the listener's thread.

    Args:
        counters: counts `side_channel_refusals` by reason.
        unfinished: is told of connections that come and go.

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
        """Before `bind`: hear of this socket's connections."""
        address = f"inproc://refusals-{uuid.uuid4().hex}"
        listener.monitor(address, _EVENTS)
        self.monitor = listener.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.connect(address)

    def on_event(self) -> None:
        """Take one event of the monitor."""
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
        """Count it; say so at most once in a while, or whoever can reach the port could fill the disk."""
        self._counters.add("side_channel_refusals", reason)
        now_s = time.monotonic()
        if now_s < self._quiet_until_s.get(reason, 0.0):
            return
        quiet_s = UNFINISHED_QUIET_S if reason == "unfinished" else QUIET_S
        self._quiet_until_s[reason] = now_s + quiet_s
        who = address or "an address that was gone before it could be asked for"
        logger.warning(
            "side channel: refused %s (%s), and what is like it within %g s: %s", who, reason, quiet_s, _TEXTS[reason]
        )

    def close(self, listener: zmq.Socket[bytes]) -> None:
        """Hear no more. What waits is taken first: ZMQ's own thread may be waiting for room."""
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
    """Who is at the other end of a file that belongs to ZMQ, and that may be closed, or be another one, by now."""
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
