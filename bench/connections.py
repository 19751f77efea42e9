"""A listener with thousands of silent connections: how long an engine waits for its handshake, and what they take.

    python -m bench.connections            # up to 9,000, half a minute
    python -m bench.connections --quick    # up to 500

A silent connection has ended ZMQ's handshake and says nothing: what an engine keeps between two renewals, and what a
client can open as many of as it likes. The listener keeps `MAX_CONNECTIONS`; beyond that the one that was silent for
longest makes room. The listener is in a child process, whose memory and files are counted.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import select
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.command import quick_or_whole
from bench.figures import Cell, Results, Table
from kvferry.link import limits
from kvferry.link.client import SideChannelClient
from kvferry.link.counters import Counters
from kvferry.link.server import SideChannelListener
from tests.plan import samples
from tests.ports import free_port

HOST = "127.0.0.1"
ENGINE_ID = "prefill"
COUNTS = (0, 1000, 8000, 9000)
QUICK_COUNTS = (0, 100, 500)
HANDSHAKES = 200
QUICK_HANDSHAKES = 20
TIMEOUT_S = 60.0
WHAT = (
    "One listener on the loopback interface that holds silent connections, and an engine that shakes hands with it "
    "again and again, each time over a connection of its own."
)

_GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HELLO = _GREETING + b"\x04" + bytes([len(_READY)]) + _READY
"""All that a client of ZMQ says before its first message."""


@dataclass(frozen=True, slots=True)
class ListenerState:
    """What the listener's process has, and how many connections it has ended for new ones."""

    memory_bytes: int
    files: int
    too_many: int


def _allow_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _listen(pipe: Connection) -> None:
    """Listen until this process is ended. Sends the port, and its state whenever it is asked."""
    _allow_files()
    counters = Counters()
    port = free_port()
    listener = SideChannelListener(HOST, port, counters)
    listener.publish(
        samples.engine(
            workers=[samples.worker([samples.tensor()])], engine_id=ENGINE_ID
        )
    )
    pipe.send(port)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    while True:
        pipe.recv()
        with open("/proc/self/statm", encoding="ascii") as statm:
            memory_bytes = int(statm.read().split()[1]) * page_bytes
        pipe.send(
            ListenerState(
                memory_bytes=memory_bytes,
                files=len(os.listdir("/proc/self/fd")),
                too_many=counters.total("side_channel_refusals", "too_many"),
            )
        )


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, Connection]]:
    """The port of a listener in a process of its own, and the pipe to it."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_listen, args=(there,), daemon=True
    )
    child.start()
    try:
        if not here.poll(TIMEOUT_S):
            raise TimeoutError(f"the listener said nothing for {TIMEOUT_S:g} s")
        yield here.recv(), here
    finally:
        child.kill()
        child.join()


def connect(port: int) -> socket.socket:
    """A connection that has ended ZMQ's handshake, and says nothing any more.

    Raises:
        OSError: it was refused, or ended.
    """
    connection = socket.create_connection((HOST, port), TIMEOUT_S)
    connection.sendall(HELLO)
    num_received = 0
    # The listener's own greeting and READY are as long as these, but for the name of its socket type.
    while num_received < len(HELLO):
        received = connection.recv(4096)
        if not received:
            raise ConnectionError(
                "the listener has ended a connection in its handshake"
            )
        num_received += len(received)
    return connection


def shake_hands(port: int, count: int) -> list[float]:
    """How many seconds each of so many handshakes takes, one after the other."""
    took_s = []
    with SideChannelClient() as client:
        for _ in range(count):
            begun_s = time.perf_counter()
            client.fetch_description(HOST, port, ENGINE_ID, "bench", TIMEOUT_S)
            took_s.append(time.perf_counter() - begun_s)
    return took_s


def num_ended(connections: Sequence[socket.socket]) -> int:
    """How many of these the listener has ended."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    return len(poll.poll(0))


def measure(
    port: int, pipe: Connection, connections: list[socket.socket], handshakes: int
) -> Sequence[Cell]:
    """A row of the table, with these silent connections."""
    took_ms = sorted(1e3 * took_s for took_s in shake_hands(port, handshakes))
    pipe.send(None)
    state = pipe.recv()
    return (
        len(connections),
        len(connections) - num_ended(connections),
        state.too_many,
        statistics.median(took_ms),
        took_ms[math.ceil(0.99 * len(took_ms)) - 1],
        state.memory_bytes / 1e6,
        state.files,
    )


def run(counts: Sequence[int], handshakes: int, *, quick: bool) -> Results:
    """Measure everything.

    Raises:
        RuntimeError: this process may not have as many files.
    """
    most_files = _allow_files()
    # The listener keeps half of its files for connections.
    if most_files < 2 * max(counts):
        raise RuntimeError(
            f"{max(counts)} connections need {2 * max(counts)} files, this process may have {most_files}: ulimit -Hn"
        )
    rows = []
    connections: list[socket.socket] = []
    with listening() as (port, pipe), contextlib.ExitStack() as opened:
        for count in counts:
            while len(connections) < count:
                connections.append(opened.enter_context(connect(port)))
            rows.append(measure(port, pipe, connections, handshakes))
    columns = (
        "opened",
        "open",
        "ended for others",
        "handshake p50, ms",
        "p99, ms",
        "memory, MB",
        "files",
    )
    return Results(
        command="python -m bench.connections" + " --quick" * quick,
        what=WHAT,
        tables=(Table("Silent connections", columns, rows),),
        notes=(
            f"A listener keeps {limits.MAX_CONNECTIONS} connections, those of the handshakes among them.",
            "Memory and files are those of the listener's whole process.",
        ),
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    most = f"{max(QUICK_COUNTS)} connections at most"
    return quick_or_whole("connections", __doc__, most, _measure)


def _measure(quick: bool) -> Results:
    if quick:
        return run(QUICK_COUNTS, QUICK_HANDSHAKES, quick=True)
    return run(COUNTS, HANDSHAKES, quick=False)


if __name__ == "__main__":
    raise SystemExit(main())
