"""TCP connections of ZMQ's sockets, to bound the bytes of a message.

ZMQ bounds the bytes of a frame and the number of queued messages, but not the frames of one message: it keeps all of
them until the last arrives, and hands them over together. An empty frame takes 2 bytes on the wire and 64 in ZMQ's
memory. No option of its releases bounds that: `ZMQ_IN_BATCH_SIZE` and the sockets without multipart messages are
drafts, which PyPI's pyzmq is built without. So both ends of a side channel read from the system how many bytes a
connection has brought (`TCP_INFO`), and end one that has brought too many.

They look while bytes arrive, every `LOOK_S`. At most 35 MB/s of empty frames were seen to pass ZMQ's I/O thread, which
is one for all connections: they bring about 350 kB between two looks, 11 MB in ZMQ's memory. Looking four times a
second cost 450 MB, and an idle process its rest.
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

LOOK_S = 0.01
"""Shortest interval between two looks at connections that bring bytes."""

RECEIVE_BUFFER_BYTES = 128 << 10
"""Of TCP, for each connection. The kernel doubles it; without it a connection may have 6 MiB there, which count as
received although ZMQ has not read them."""

_RECEIVED_AT, _INFO_BYTES = 128, 136  # `tcpi_bytes_received` in Linux's `struct tcp_info`


class TcpConnection:
    """A connection by its file number, as the monitor of a ZMQ socket reports it.

    ZMQ may have closed it, and the number be in use by another connection: before it is ended, the addresses of both
    ends are compared.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._ends: tuple[Any, Any] | None = None
        self._finished_bytes = 0
        with contextlib.suppress(OSError), self._copy() as copy:
            self._ends = copy.getsockname(), copy.getpeername()

    @property
    def peer(self) -> str:
        """The address of the other end; empty if it was gone before that was read."""
        return str(self._ends[1][0]) if self._ends is not None else ""

    def message_received(self) -> None:
        """Count the bytes of the next message from here."""
        self._finished_bytes = self._received_bytes()

    def unfinished_bytes(self) -> int:
        """Bytes received since the last message; 0 or less if the connection is gone."""
        return self._received_bytes() - self._finished_bytes

    def shut_down(self) -> bool:
        """End it. Returns whether it was there.

        ZMQ sees the end and closes its file, which resets the connection: the sender would wait for a minute otherwise.
        """
        with contextlib.suppress(OSError), self._copy() as copy:
            if (copy.getsockname(), copy.getpeername()) == self._ends:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
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
        copy = os.dup(self._file)
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            raise
        with connection:
            yield connection


class Arrivals:
    """Reports which of many connections have brought bytes. Those that are silent cost nothing.

    It watches ZMQ's own files, beside ZMQ, whose thread may have read the bytes before anyone looks: epoll then reports
    nothing to read. So it watches for the edge of either kind: a connection that can be written to is reported all the
    same when bytes come.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """A file that is readable when there is something to `take`."""
        return self._epoll.fileno()

    def watch(self, file: int) -> None:
        """Report this connection whenever it has brought bytes, until ZMQ closes it."""
        with contextlib.suppress(OSError):  # it has
            self._epoll.register(file, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)

    def take(self) -> list[int]:
        """The connections that have brought bytes since the last call, and perhaps others."""
        return [file for file, _ in self._epoll.poll(0)]

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        self._epoll.close()
