"""Connections that send a message without an end, or are too many.

ZMQ bounds the bytes of a frame and the messages that wait, but not the frames of one message: it keeps all of them
until the last has come. So the bytes that a connection has sent since its last whole message are counted, by asking
the system, and a connection that has sent too many is ended. So is, when there are too many, the one that has said
nothing for longest: an engine connects anew when it has something to say, and its process has files for other things.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket as sockets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
        told = connection.getsockopt(sockets.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        return int(_RECEIVED.unpack_from(told, _RECEIVED_AT)[0])
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
