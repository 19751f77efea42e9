"""A client of the side channel that can send any bytes, and free ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from kvferry.protocol.handshake import EngineDescription, Hello, Refused, decode_reply, encode
from kvferry.scheduler.state.counters import Counters
from tests.scheduler.recording_listener import RecordingListener

HOST = "127.0.0.1"


def free_port(host: str = HOST) -> int:
    """A port that was free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def listening(counters: Counters | None = None) -> Iterator[tuple[RecordingListener, int]]:
    """A listener on a free port, closed at the end."""
    port = free_port()
    listener = RecordingListener(HOST, port, counters or Counters())
    try:
        yield listener, port
    finally:
        listener.close()


@contextmanager
def client(
    port: int, kind: int = zmq.DEALER, *, host: str = HOST, receive_queue: int = 1000
) -> Iterator[zmq.Socket[bytes]]:
    """A connected socket, closed at the end with everything that is under way."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    sock = context.socket(kind)
    sock.setsockopt(zmq.RCVTIMEO, 10_000)
    sock.setsockopt(zmq.SNDTIMEO, 10_000)
    sock.setsockopt(zmq.RCVHWM, receive_queue)
    sock.setsockopt(zmq.LINGER, 2_000)
    sock.setsockopt(zmq.IPV6, int(":" in host))
    sock.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    try:
        yield sock
    finally:
        sock.close()
        context.term()


def ask(port: int, engine_id: str = "prefill-0", version: int = 1, host: str = HOST) -> EngineDescription | Refused:
    """One handshake over a socket of its own."""
    with client(port, zmq.REQ, host=host) as sock:
        sock.send(encode(Hello(engine_id=engine_id, asker="test", version=version)))
        return decode_reply(sock.recv())


BEFORE: set[threading.Thread] = set()
"""Threads that other tests of this process have left; set before every test."""


def threads_named(name: str) -> list[threading.Thread]:
    """Running threads with this name, except those that existed before the test."""
    return [thread for thread in threading.enumerate() if thread.name == name and thread not in BEFORE]


def cpu_share(seconds: float) -> float:
    """The fraction of one core that this process uses while it is idle for some seconds."""
    wall_s, cpu_s = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
