"""The connections that a listening socket has accepted: refused ones are counted, and three kinds are closed.

| closed | when |
| --- | --- |
| a connection that has sent too many bytes since its last whole message (`tcp.py`) | it is checked next |
| the largest connection of the host that has sent most | all together have sent too many such bytes |
| the connection that has been silent for longest | there are too many connections |

ZMQ reports connections on a monitor, by file number.
"""

from __future__ import annotations

import heapq
import logging
import resource
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import zmq

from kvferry.link import limits
from kvferry.link.counters import Counters
from kvferry.link.sockets import unpack_event, watch
from kvferry.link.tcp import Arrivals, TcpConnection
from kvferry.protocol.handshake import MAX_REQUEST_BYTES
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

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
    """Attributes:
    capacity: connections that are kept.
    unfinished_bytes: of each connection's message that has not arrived whole, by its file; the latest to send is last.
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
        # The process needs files for other things, too.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.capacity = min(limits.MAX_CONNECTIONS, files // 2)
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
