"""A queue that any thread fills and whose reader may wait for sockets at the same time."""

from __future__ import annotations

import contextlib
import queue
import socket
from typing import Generic, TypeVar

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
