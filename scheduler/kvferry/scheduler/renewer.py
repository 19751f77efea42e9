"""The consumer's half of the side channel: one thread that renews leases and gives them back.

Nothing here waits for an answer, so a dead producer delays nobody: ZMQ connects in the background and drops what it
cannot deliver.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

import zmq

from kvferry.protocol.handshake import MAX_RENEWALS, LeaseName, Release, Renew, encode
from kvferry.scheduler.consumer.ledger import GiveBack, Keep, LeaseCommand, LeaseKey, RemoteLease
from kvferry.scheduler.listener import channel_address
from kvferry.scheduler.producer.ledger import HEARTBEATS_PER_LEASE
from kvferry.scheduler.tally import Tally

logger = logging.getLogger(__name__)

_IDLE_SOCKET_S = 60.0
_LINGER_MS = 500
_QUEUED_MESSAGES = 64
_JOIN_S = 5.0

Endpoint = tuple[str, int]


class LeaseRenewer:
    """Carries out `Keep`, `Drop` and `GiveBack` until `close`.

    A kept lease is renewed when a sixth of its time is over, together with all others of its producer.

    Args:
        tally: counts `heartbeats`, `leases_given_back` and `side_channel_errors`.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._inbox: queue.SimpleQueue[LeaseCommand | None] = queue.SimpleQueue()
        self._kept: dict[LeaseKey, RemoteLease] = {}
        self._due: dict[Endpoint, float] = {}
        self._sockets: dict[Endpoint, tuple[zmq.Socket[bytes], float]] = {}
        self._context = zmq.Context(io_threads=1)
        self._thread = threading.Thread(target=self._run, name="kvferry-renewer", daemon=True)
        self._thread.start()

    def submit(self, commands: Iterable[LeaseCommand]) -> None:
        """Hand over commands; returns at once."""
        for command in commands:
            self._inbox.put(command)

    def close(self) -> None:
        """Stop the thread after everything submitted has been sent. Idempotent."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            try:
                command = self._inbox.get(timeout=self._wait_s())
            except queue.Empty:
                self._renew_due(time.monotonic())
                continue
            if command is None:
                break
            try:
                self._carry_out(command, time.monotonic())
            except zmq.ZMQError as refused:
                self._tally.add("side_channel_errors")
                logger.warning("side channel of %s:%d: %s", command.lease.host, command.lease.port, refused)
            self._renew_due(time.monotonic())
        for socket, _ in self._sockets.values():
            socket.close(linger=_LINGER_MS)
        self._context.term()

    def _wait_s(self) -> float | None:
        """Until the next renewal or the next socket to close; None (for ever) when there is neither."""
        times = [*self._due.values(), *(used + _IDLE_SOCKET_S for _, used in self._sockets.values())]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _carry_out(self, command: LeaseCommand, now_s: float) -> None:
        lease = command.lease
        if isinstance(command, Keep):
            self._kept[lease.key] = lease
            endpoint = (lease.host, lease.port)
            first = now_s + lease.lease_s / HEARTBEATS_PER_LEASE
            self._due[endpoint] = min(self._due.get(endpoint, first), first)
            return
        self._kept.pop(lease.key, None)
        if isinstance(command, GiveBack):
            self._send((lease.host, lease.port), Release(boot=lease.boot, leases=(lease.name,)), now_s)
            self._tally.add("leases_given_back")

    def _renew_due(self, now_s: float) -> None:
        for endpoint in [endpoint for endpoint, due in self._due.items() if due <= now_s]:
            leases = [lease for lease in self._kept.values() if (lease.host, lease.port) == endpoint]
            if not leases:
                del self._due[endpoint]
                continue
            self._due[endpoint] = now_s + min(lease.lease_s for lease in leases) / HEARTBEATS_PER_LEASE
            by_boot: defaultdict[str, list[LeaseName]] = defaultdict(list)
            for lease in leases:
                by_boot[lease.boot].append(lease.name)
            for boot, names in by_boot.items():
                for start in range(0, len(names), MAX_RENEWALS):
                    self._send(endpoint, Renew(boot=boot, leases=tuple(names[start : start + MAX_RENEWALS])), now_s)
                self._tally.add("heartbeats", amount=len(names))
        for endpoint in [e for e, (_, used) in self._sockets.items() if used + _IDLE_SOCKET_S <= now_s]:
            self._sockets.pop(endpoint)[0].close(linger=0)

    def _send(self, endpoint: Endpoint, message: Renew | Release, now_s: float) -> None:
        try:
            socket = self._sockets[endpoint][0] if endpoint in self._sockets else self._connect(endpoint)
            self._sockets[endpoint] = (socket, now_s)
            socket.send_multipart([b"", encode(message)], flags=zmq.NOBLOCK)
        except (zmq.ZMQError, ValueError) as refused:
            self._tally.add("side_channel_errors")
            logger.warning("side channel of %s:%d: %s", *endpoint, refused)

    def _connect(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        host, port = endpoint
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(channel_address(host, port))
        except zmq.ZMQError:
            socket.close()
            raise
        return socket
