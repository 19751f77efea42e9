"""The threads of ZMQ that all handshakes of a worker share, so that none of them starts and ends its own."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Iterator

import zmq

from kvferry.protocol.errors import HandshakeFailed

Context = zmq.Context[zmq.Socket[bytes]]


class AskingThreads:
    """Used by any number of threads. Ends with the last handshake after `close`, and nobody waits for that.

    One that was never used has nothing to end.
    """

    def __init__(self) -> None:
        self._context: Context | None = None
        self._users = 0
        self._is_closing = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start them now, and not with the first handshake."""
        with self._use() as context:
            context.socket(zmq.PAIR).close(linger=0)

    @contextlib.contextmanager
    def use(self, host: str) -> Iterator[Context]:
        """For a handshake with this host; its sockets are to be closed within.

        A host with a name gets threads of its own: ZMQ looks names up on its only one, and a name server that is slow
        for one would hold up the others.

        Raises:
            HandshakeFailed: they were closed.
        """
        with self._use() if _is_address(host) else own_threads() as context:
            yield context

    def close(self) -> None:
        """No handshake begins any more. Idempotent."""
        with self._lock:
            self._is_closing = True
        self._end_unless_used()

    @contextlib.contextmanager
    def _use(self) -> Iterator[Context]:
        with self._lock:
            if self._is_closing:
                raise HandshakeFailed("this worker is closed")
            if self._context is None:
                self._context = zmq.Context(io_threads=1)
            context = self._context
            self._users += 1
        try:
            yield context
        finally:
            with self._lock:
                self._users -= 1
            self._end_unless_used()

    def _end_unless_used(self) -> None:
        with self._lock:
            if not self._is_closing or self._users:
                return
            context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)


@contextlib.contextmanager
def own_threads() -> Iterator[Context]:
    """Of one handshake."""
    context: Context = zmq.Context(io_threads=1)
    try:
        yield context
    finally:
        context.destroy(linger=0)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
