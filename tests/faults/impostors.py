"""Other processes that listen where a producer is expected."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import zmq

from kvferry.protocol.handshake import Hello, decode_request, zmq_address
from tests.harness.cache_engine import HOST

GARBAGE = random.Random(1).randbytes(4096)
HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 5\r\nConnection: close\r\n\r\nwhat?"
)
_GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
HUGE_FRAME = (
    _GREETING
    + b"\x04"
    + bytes([len(_READY)])
    + _READY
    + b"\x01\x00"
    + b"\x02"
    + (1 << 40).to_bytes(8, "big")
)
"""A good greeting of ZMQ, then an answer that says that it has a terabyte."""


@contextlib.contextmanager
def tcp_impostor(port: int, says: bytes) -> Iterator[None]:
    """A TCP server that sends the same bytes to every client and reads nothing."""
    connections: list[socket.socket] = []
    with socket.create_server((HOST, port)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    with contextlib.suppress(OSError):
                        connection.sendall(says)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


@contextlib.contextmanager
def zmq_impostor(port: int, *answer: bytes) -> Iterator[None]:
    """A ROUTER that answers every `Hello` with these frames."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(zmq_address(HOST, port))
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            if router.poll(20):
                client_id, empty, body = router.recv_multipart()
                if isinstance(decode_request(body), Hello):
                    router.send_multipart([client_id, empty, *answer])
        router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        context.term()
