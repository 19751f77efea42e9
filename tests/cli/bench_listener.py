"""A benchmark's listener on a free port, on a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.cli.bench.client import ListenerSession
from kvferry.cli.bench.listener import BenchListener
from kvferry.cli.transfer.messages import Reply, Request, Task
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.secrets import Secrets
from tests.link.channel import HOST, free_port

TAME = ("-m", "tests.cli.owners")
TASK = Task(device="cpu", max_bytes=64 << 10)
TIMEOUT_S = 10.0


@dataclass
class Served:
    """A running listener.

    Attributes:
        said: its lines. codes: its exit status, once it has ended.
    """

    listener: BenchListener
    port: int
    said: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def session(self, known: Secrets = ()) -> ListenerSession:
        """A client of this listener."""
        return ListenerSession(HOST, self.port, TIMEOUT_S, known)

    def ask(self, request: Request, known: Secrets = ()) -> Reply:
        """The listener's reply."""
        return self.session(known).ask(request, TIMEOUT_S)

    def join(self, metadata: bytes = b"m") -> str:
        """Join as soon as the listener is ready; returns the session's name."""
        session = self.session()
        session.join(metadata)
        return session.name


@contextmanager
def bench_listening(
    command: tuple[str, ...] = TAME,
    known: Secrets = (),
    allowed: AllowedHosts | None = None,
) -> Iterator[Served]:
    """A listener that serves until its client has left, or until the end of the block."""
    port = free_port()
    said: list[str] = []
    listener = BenchListener(HOST, port, TASK, known, said.append, command, allowed)
    served = Served(listener, port, said)
    thread = threading.Thread(
        target=lambda: served.codes.append(listener.serve()),
        name="kvferry-bench-listener",
    )
    thread.start()
    try:
        yield served
    finally:
        listener.stop()
        thread.join()
        listener.close()
