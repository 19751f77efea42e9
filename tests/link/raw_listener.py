"""The listener's end of a side channel over plain TCP, which can break off where ZMQ's would not."""

from __future__ import annotations

import contextlib
import socket
import struct

_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
ZMTP = (
    b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00"
    + b"NULL".ljust(20, b"\0")
    + bytes(32)
    + b"\x04"
    + bytes([len(_READY)])
    + _READY
)
"""The listener's half of a whole ZMTP handshake."""


def cut(server: socket.socket, times: int) -> None:
    """Accept so many connections, and end each at once."""
    for _ in range(times):
        server.accept()[0].close()


def send_at_once(server: socket.socket, said: bytes) -> None:
    """Accept a connection, send this, and wait for its end."""
    connection, _ = server.accept()
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(said)
        while connection.recv(4096):
            pass


def answer_of(body: bytes) -> bytes:
    """The bytes of an answer of one frame."""
    return b"\x01\x00\x02" + struct.pack(">Q", len(body)) + body


def end_after_the_request(
    server: socket.socket, answer: bytes = b"", request: bytes = b"hello"
) -> None:
    """Accept a connection, and end it at once after a request with these bytes, or after its answer."""
    connection, _ = server.accept()
    with connection:
        connection.sendall(ZMTP)
        receive_until(connection, request)
        connection.sendall(answer)


def answer_without_end(server: socket.socket, most_bytes: int) -> int:
    """Accept a connection and answer its request with empty frames of one message until the other end closes it.

    Returns how many bytes that were, at most about `most_bytes`.
    """
    connection, _ = server.accept()
    sent = 0
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(ZMTP)
        receive_until(connection, b"hello")
        while sent < most_bytes:
            connection.sendall(b"\x01\x00" * 4096)
            sent += 8192
    return sent


def receive_until(connection: socket.socket, request: bytes) -> None:
    """Read as far as these bytes."""
    received = b""
    while request not in received:
        received += connection.recv(4096)


def answer_unasked(server: socket.socket, answer: bytes) -> bytes:
    """Accept a connection without a secret, and answer before a request. Returns everything that was received."""
    connection, _ = server.accept()
    received = b""
    with connection, contextlib.suppress(ConnectionError):
        connection.sendall(ZMTP)
        while part := connection.recv(4096):
            received += part
            if b"READY" in part:
                connection.sendall(answer)
    return received
