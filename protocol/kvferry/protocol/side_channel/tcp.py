"""TCP connections of ZMQ's sockets, by the file number that their monitors report.

ZMQ bounds the bytes of a frame and the number of queued messages, but not the frames of one message: it keeps all of
them until the last arrives. So both ends of a side channel read from the system how many bytes a connection has brought
(`TCP_INFO`), and end one that has brought too many. The number may be in use by another connection by then, so the
addresses are compared first.
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

Ends = tuple[Any, Any]
"""The addresses of both ends of a connection."""


def ends_of(file: int) -> Ends | None:
    """Both addresses of a connection; None when it is gone."""
    with contextlib.suppress(OSError), _copy(file) as copy:
        return copy.getsockname(), copy.getpeername()
    return None


def bytes_received(file: int) -> int:
    """Bytes that a connection has brought since it began; 0 if unknown."""
    with contextlib.suppress(OSError), _copy(file) as copy:
        reported = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return int.from_bytes(reported[_RECEIVED_AT:], sys.byteorder)
    return 0


def shut_down(file: int, ends: Ends | None) -> bool:
    """End a connection if its file still has these addresses. Returns whether it was ended.

    ZMQ sees the end and closes its file, which resets the connection: the sender would wait for a minute otherwise.
    """
    with contextlib.suppress(OSError), _copy(file) as copy:
        if (copy.getsockname(), copy.getpeername()) == ends:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            copy.shutdown(socket.SHUT_RDWR)
            return True
    return False


@contextlib.contextmanager
def _copy(file: int) -> Iterator[socket.socket]:
    """A socket on a copy of ZMQ's file."""
    copy = os.dup(file)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection
