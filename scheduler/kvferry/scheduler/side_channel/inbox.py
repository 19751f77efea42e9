"""Renewals and releases that wait for the next step.

An idle engine takes none for minutes, while consumers renew with every heartbeat. So what waits is kept by lease:
a renewal takes the place of the one before it, and says when it was heard, because that is when it counts.

The other queue here is filled by any thread, and its reader may wait for sockets at the same time.
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
"""Most leases that wait, of a few hundred bytes each; one message may name 4,096."""


class Heard(NamedTuple):
    """One lease of one message.

    Attributes:
        boot: whom it was said to.
        received_s: when, by the engine's own `AwakeClock`; None where that is not known.
    """

    kind: type[LeaseMessage]
    boot: str
    name: LeaseName
    received_s: float | None


class LeaseInbox:
    """Filled by the listener's thread, taken by the engine's."""

    def __init__(self) -> None:
        self._received: dict[tuple[type[LeaseMessage], str, LeaseName], float | None] = {}
        self._lock = threading.Lock()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        """Remember all that a message says. False, and nothing is remembered, when too much waits already."""
        kind = type(message)
        with self._lock:
            new = sum((kind, message.boot, name) not in self._received for name in set(message.leases))
            if len(self._received) + new > MAX_WAITING_LEASES:
                return False
            for name in message.leases:
                self._received.pop((kind, message.boot, name), None)  # what was said last comes last
                self._received[kind, message.boot, name] = received_s
        return True

    def take(self) -> list[Heard]:
        """Everything, in the order in which it was said last."""
        if not self._received:
            return []
        with self._lock:
            received, self._received = self._received, {}
        return [Heard(*key, received_s) for key, received_s in received.items()]

    def qsize(self) -> int:
        """Leases that wait; one that was renewed and released counts twice."""
        return len(self._received)

    def empty(self) -> bool:
        return not self._received


T = TypeVar("T")


class WakingQueue(Generic[T]):
    """First in, first out; readable as a file while something has been put since the reader last found it empty."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._readable, self._written = socket.socketpair()
        self._readable.setblocking(False)
        self._written.setblocking(False)
        self._is_awake = False
        """Whether a byte lies there that the reader will find, or the reader is about to look once more."""

    def put(self, item: T) -> None:
        """From any thread, also after `close`; never waits."""
        self._queue.put(item)
        self.wake()

    def put_quietly(self, item: T) -> None:
        """As `put`, for an item that has time: the reader finds it when something else wakes it."""
        self._queue.put(item)

    def wake(self) -> None:
        """Only the first one that finds the reader asleep wakes it: the call to the system gives the interpreter's lock
        away."""
        if self._is_awake:
            return
        self._is_awake = True
        # Full is as good as readable; and after `close` nobody is to be woken.
        with contextlib.suppress(OSError):
            self._written.send(b"\x00")

    def get(self) -> T:
        """The reader's; never waits. Raises `queue.Empty`."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            with contextlib.suppress(OSError):
                self._readable.recv(1 << 16)
        # Whatever was put before this line is found now; what comes later brings a byte of its own.
        self._is_awake = False
        return self._queue.get_nowait()

    def __len__(self) -> int:
        return self._queue.qsize()

    def empty(self) -> bool:
        return self._queue.empty()

    def fileno(self) -> int:
        """What the reader waits for, when `empty` says so."""
        return self._readable.fileno()

    def close(self) -> None:
        self._readable.close()
        self._written.close()
