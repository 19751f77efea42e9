"""TCP connections of ZMQ's sockets, to bound the bytes of a message.

ZMQ bounds the bytes of a frame and the number of queued messages, but not the frames of one message: it keeps all of
them until the last arrives, and hands them over together. An empty frame takes 2 bytes on the wire and 64 in ZMQ's
memory. So both ends of a side channel read from the system how many bytes a connection has brought (`TCP_INFO`), and
end one that has brought too many.

No option of ZMQ's releases bounds that: `ZMQ_IN_BATCH_SIZE` and the sockets without multipart messages are drafts,
which PyPI's pyzmq is built without.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

# `tcpi_bytes_received` in Linux's `struct tcp_info`.
_RECEIVED_AT = 128
_INFO_BYTES = 136

# `struct linger`: on, and for no time. The end of a connection is then a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


class TcpConnection:
    """A connection by its file number, as the monitor of a ZMQ socket reports it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._ends: tuple[Any, Any] | None = None
        self._finished_bytes = 0
        with contextlib.suppress(OSError), self._copy() as copy:
            self._ends = (copy.getsockname(), copy.getpeername())

    @property
    def peer(self) -> str:
        """The address of the other end; empty if the connection was gone before its address was read."""
        if self._ends is None:
            return ""
        _, peer = self._ends
        return str(peer[0])

    def message_received(self) -> None:
        """Count the bytes of the next message from here."""
        self._finished_bytes = self._received_bytes()

    def unfinished_bytes(self) -> int:
        """Bytes received since the last message; 0 or less if the connection is gone."""
        return self._received_bytes() - self._finished_bytes

    def shut_down(self) -> bool:
        """End it.

        Returns:
            Whether it was there.
        """
        with contextlib.suppress(OSError), self._copy() as copy:
            # ZMQ may have closed it, and another connection may have its file number by now.
            if (copy.getsockname(), copy.getpeername()) != self._ends:
                return False
            # ZMQ sees the end and closes its file, which resets the connection. Without a reset the sender would wait
            # for a minute.
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            copy.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def _received_bytes(self) -> int:
        with contextlib.suppress(OSError), self._copy() as copy:
            reported = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            return int.from_bytes(reported[_RECEIVED_AT:], sys.byteorder)
        return 0

    @contextlib.contextmanager
    def _copy(self) -> Iterator[socket.socket]:
        """A socket on a copy of ZMQ's file."""
        # A copy, since a Python socket closes its file.
        file = os.dup(self._file)
        try:
            connection = socket.socket(fileno=file)
        except OSError:
            os.close(file)
            raise
        with connection:
            yield connection


class Arrivals:
    """Reports which of many connections have brought bytes. Silent connections cost nothing."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """A file that is readable when there is something to `take`."""
        return self._epoll.fileno()

    def watch(self, file: int) -> None:
        """Report this connection whenever it has brought bytes, until ZMQ closes it."""
        # These are ZMQ's own files. ZMQ's thread may have read the bytes before this epoll is asked, which then reports
        # nothing to read. With edges of both kinds it does: a connection that can be written to is reported when bytes
        # come, whoever reads them.
        events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
        with contextlib.suppress(OSError):  # ZMQ has closed it already
            self._epoll.register(file, events)

    def take(self) -> list[int]:
        """The connections that have brought bytes since the last call, and perhaps others."""
        return [file for file, _ in self._epoll.poll(0)]

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        self._epoll.close()
