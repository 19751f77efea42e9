"""Connections to a listener that came to nothing: counted, and named in the log at most once in a while.

ZMQ tells of them on a monitor, by the number of the connection's file. The address behind that can be asked for only
while the connection lives, which one that is refused does not do for long: it is told when it was caught in time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket as sockets
import struct
import time
import uuid

import zmq

from kvferry.scheduler.tally import Tally
from kvferry.scheduler.unfinished import UnfinishedMessages

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
        tally: counts `side_channel_refusals` by reason.
        unfinished: is told of connections that come and go.

    Attributes:
        monitor: to be polled; when it is readable, call `hear`. None before `watch`.
    """

    def __init__(self, tally: Tally, unfinished: UnfinishedMessages) -> None:
        self.monitor: zmq.Socket[bytes] | None = None
        self._tally = tally
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

    def hear(self) -> None:
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
        self._tally.add("side_channel_refusals", reason)
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
