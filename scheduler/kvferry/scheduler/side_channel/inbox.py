"""Renewals and releases that wait for the next step, and a queue whose reader can poll it together with sockets.

An idle engine takes no steps for minutes, while consumers renew with every heartbeat. So the inbox keeps one entry per
lease and kind: a renewal replaces the one before it. Its time of arrival is kept too, since the renewal counts from it.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import Generic, NamedTuple, TypeVar

from kvferry.protocol.handshake import LeaseName, Release, Renew

LeaseMessage = Renew | Release

MAX_WAITING_LEASES = 1 << 16
"""Most waiting entries, of a few hundred bytes each; one message may name 4,096 leases."""


class ReceivedLease(NamedTuple):
    """One lease of one message.

    Attributes:
        boot: the boot that the message was addressed to.
        received_s: time of arrival on the engine's `AwakeClock`; None without a clock.
    """

    kind: type[LeaseMessage]
    boot: str
    name: LeaseName
    received_s: float | None


class LeaseInbox:
    """Filled by the listener's thread, emptied by the engine's."""

    def __init__(self) -> None:
        self._received: dict[tuple[type[LeaseMessage], str, LeaseName], float | None] = {}
        self._lock = threading.Lock()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        """Add all leases of a message. False if too many wait already; then none is added."""
        kind = type(message)
        with self._lock:
            new = sum((kind, message.boot, name) not in self._received for name in set(message.leases))
            if len(self._received) + new > MAX_WAITING_LEASES:
                return False
            for name in message.leases:
                self._received.pop((kind, message.boot, name), None)  # the latest is last
                self._received[kind, message.boot, name] = received_s
        return True

    def take(self) -> list[ReceivedLease]:
        """Remove and return all entries, in the order of their latest arrival."""
        if not self._received:
            return []
        with self._lock:
            received, self._received = self._received, {}
        return [ReceivedLease(*key, received_s) for key, received_s in received.items()]

    def qsize(self) -> int:
        """The number of waiting entries; a lease that was renewed and released counts twice."""
        return len(self._received)

    def empty(self) -> bool:
        return not self._received


T = TypeVar("T")


class WakingQueue(Generic[T]):
    """A FIFO queue whose file is readable if something was put since the reader last found it empty."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._readable, self._written = socket.socketpair()
        self._readable.setblocking(False)
        self._written.setblocking(False)
        self._is_awake = False
        """Whether a wake-up byte is in the socket, or the reader is about to check the queue again."""

    def put(self, item: T) -> None:
        """Add an item from any thread, also after `close`; never waits."""
        self._queue.put(item)
        self.wake()

    def put_quietly(self, item: T) -> None:
        """As `put`, without waking the reader: it finds the item at its next wake-up."""
        self._queue.put(item)

    def wake(self) -> None:
        """Wake the reader. Only the first call while it sleeps makes a system call, which releases the GIL."""
        if self._is_awake:
            return
        self._is_awake = True
        # A full socket is readable anyway; after `close` there is no reader to wake.
        with contextlib.suppress(OSError):
            self._written.send(b"\x00")

    def get(self) -> T:
        """Remove and return the first item, in the reader's thread; never waits. Raises `queue.Empty`."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            with contextlib.suppress(OSError):
                self._readable.recv(1 << 16)
        # An item put before this line is found by the next one; a later `put` writes a new byte.
        self._is_awake = False
        return self._queue.get_nowait()

    def __len__(self) -> int:
        return self._queue.qsize()

    def empty(self) -> bool:
        return self._queue.empty()

    def fileno(self) -> int:
        """The file that the reader polls when `empty` returns True."""
        return self._readable.fileno()

    def close(self) -> None:
        self._readable.close()
        self._written.close()
