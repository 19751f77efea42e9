"""TCP connections of ZMQ's sockets, to bound the bytes of a message.

ZMQ bounds the bytes of a frame and the number of queued messages, but not the frames of one message: it keeps all of
them until the last arrives. So both ends of a side channel read from the system how many bytes a connection has brought
(`TCP_INFO`), and end one that has brought too many.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

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
