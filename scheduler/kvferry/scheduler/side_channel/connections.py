"""The connections of a listening socket: refused ones are counted, endless messages and too many connections ended.

A connection that has sent too many bytes since its last whole message is closed (`tcp.py`). When all together have sent
too many, the host that has sent most of them loses its largest. When there are too many connections, the one that has
been silent for longest is closed: an engine connects again when needed, and the process needs its files.

ZMQ reports connections on a monitor, by file number. It closes a refused one so soon that its peer's address may be
missing in the log.
"""

from __future__ import annotations

import heapq
import logging
import resource
from collections import Counter

import zmq

from kvferry.protocol.handshake import MAX_REQUEST_BYTES
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.protocol.side_channel.sockets import REQUESTS_QUEUED, unpack_event, watch
from kvferry.protocol.side_channel.tcp import RECEIVE_BUFFER_BYTES, Arrivals, TcpConnection
from kvferry.scheduler.counters import Counters

logger = logging.getLogger(__name__)

MAX_UNFINISHED_BYTES = (REQUESTS_QUEUED + 1) * MAX_REQUEST_BYTES + 4 * RECEIVE_BUFFER_BYTES
"""More than whole messages can have in flight: those in ZMQ's queue, one that waits to enter it, and what is in TCP's
buffer. Of empty frames it is 40 MB in ZMQ's memory."""

MAX_UNFINISHED_IN_ALL_BYTES = 16 << 20
"""Of all open connections together: 512 MB of empty frames at worst. A thousand consumers that renew a hundred leases
each at the same moment send a third of it. Connections that have ended are in no bound: the kernel forgets their bytes
with them, while ZMQ keeps the frames. Only a secret keeps a client out that opens one after the other."""

MAX_CONNECTIONS = 8192
"""More than the workers of 1,000 engines of 8 that ask at the same time; half of the process's file limit if that is
less."""

_LINE_S = 1.0
_UNFINISHED_LINE_S = 60.0
"""Plain TCP probes look the same, so they are logged less often."""

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


class Connections:
    """Used by the listener's thread only.

    Args:
        listener: not bound yet.
        counters: counts `side_channel_refusals` by reason.

    Attributes:
        monitor: to be polled; when it is readable, call `on_event`.
        arrivals: to be polled; when it is readable, call `end_endless`, at most every `CHECK_INTERVAL_S`.
        most: connections that are kept.
    """

    def __init__(self, listener: zmq.Socket[bytes], counters: Counters) -> None:
        self.most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._listener = listener
        self._counters = counters
        self._known: dict[int, TcpConnection] = {}  # the latest to send is last
        self.arrivals = Arrivals()
        self._unfinished_bytes: dict[int, int] = {}  # by file, when it was last looked at
        self._reason: str | None = None
        self._logs = {
            reason: RateLimitedLog(
                logger, _UNFINISHED_LINE_S if reason == "unfinished" else _LINE_S
            )
            for reason in _TEXTS
        }
        self.monitor = watch(listener, _EVENTS)

    def on_event(self) -> None:
        """Process one event of the monitor. That of a failed handshake comes before its connection's end."""
        event, value = unpack_event(self.monitor.recv_multipart())
        if event == zmq.EVENT_ACCEPTED:
            self.accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            ended = self._forget(value)
            reason, self._reason = self._reason, None
            if reason is not None:
                self.refused(reason, ended.peer if ended is not None else "")
        else:
            self._reason = _REASON_OF_ERROR.get(value, "unfinished")

    def accepted(self, file: int) -> None:
        """Add a new connection, in place of the one that was silent for longest if there are too many."""
        self._forget(file)
        self._known[file] = TcpConnection(file)
        self.arrivals.watch(file)
        if len(self._known) > self.most:
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

    def end(self, file: int) -> bool:
        """Close a connection. Returns whether it was there."""
        connection = self._forget(file)
        return connection is not None and connection.shut_down()

    def end_endless(self) -> int:
        """Look at the connections that have sent bytes, and close those with too many bytes of one message. Returns how
        many."""
        for file in self.arrivals.take():
            if file in self._known:
                self._unfinished_bytes[file] = self._known[file].unfinished_bytes()
        too_many = [
            file
            for file, unfinished in self._unfinished_bytes.items()
            if unfinished > MAX_UNFINISHED_BYTES
        ]
        num_ended = sum(self.end(file) for file in too_many)
        if sum(self._unfinished_bytes.values()) > MAX_UNFINISHED_IN_ALL_BYTES:
            num_ended += self._end_largest()
        return num_ended

    def _end_largest(self) -> int:
        """Close the largest connection of the host with the most bytes, until those of all are few enough. Returns how
        many.

        The largest of all were closed at first: with a thousand connections of one host, 17 KiB on each, every longer
        request of another host cost its connection.
        """
        in_all = sum(self._unfinished_bytes.values())
        of_host: dict[str, list[int]] = {}  # files, the largest is last
        bytes_of_host: Counter[str] = Counter()
        for file in sorted(self._unfinished_bytes, key=self._unfinished_bytes.__getitem__):
            host = self._known[file].peer
            of_host.setdefault(host, []).append(file)
            bytes_of_host[host] += self._unfinished_bytes[file]
        hosts = [(-total, host) for host, total in bytes_of_host.items()]
        heapq.heapify(hosts)
        num_ended = 0
        while in_all > MAX_UNFINISHED_IN_ALL_BYTES:
            negated, host = heapq.heappop(hosts)
            file = of_host[host].pop()
            unfinished = self._unfinished_bytes[file]
            in_all -= unfinished
            num_ended += self.end(file)
            heapq.heappush(hosts, (negated + unfinished, host))
        return num_ended

    def _forget(self, file: int) -> TcpConnection | None:
        self._unfinished_bytes.pop(file, None)
        return self._known.pop(file, None)

    def refused(self, reason: str, peer: str) -> None:
        """Count a refusal and log it."""
        self._counters.add("side_channel_refusals", reason)
        who = peer or "an unknown address"
        self._logs[reason].warning("side channel: refused %s (%s): %s", who, reason, _TEXTS[reason])

    def close(self) -> None:
        """Stop the monitor. Its queue is emptied first: ZMQ's I/O thread may be blocked on it."""
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
        self._listener.disable_monitor()
        self.monitor.close()
        self.arrivals.close()
