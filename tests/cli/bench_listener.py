"""A benchmark's listener on a free port, on a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.cli.bench.client import Session
from kvferry.cli.bench.listener import BenchListener
from kvferry.cli.transfer.messages import Offer, Reply, Request, Task
from kvferry.protocol.side_channel.secrets import Secrets
from tests.scheduler.channel import HOST, free_port

TAME = ("-m", "tests.cli.tame_owner")
TASK = Task(device="cpu", max_bytes=64 << 10)
TIMEOUT_S = 10.0


@dataclass
class Served:
    """A running listener.

    Attributes:
        said: its lines. codes: what `--once` would have ended with, once it has.
    """

    listener: BenchListener
    port: int
    said: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def session(self, known: Secrets = ()) -> Session:
        """A client of this listener."""
        return Session(HOST, self.port, TIMEOUT_S, known)

    def ask(self, request: Request, known: Secrets = ()) -> Reply:
        """The listener's reply."""
        return self.session(known).ask(request, TIMEOUT_S)

    def join(self, metadata: bytes = b"m") -> tuple[str, Offer]:
        """Join as soon as the listener is ready; returns the session's name and the offer."""
        session = self.session()
        return session.name, session.join(metadata)


@contextmanager
def bench_listening(
    command: tuple[str, ...] = TAME, known: Secrets = (), *, once: bool = False, start: bool = True
) -> Iterator[Served]:
    """A listener that serves until the end of the block, or until one client has left; not at all without `start`."""
    port = free_port()
    said: list[str] = []
    listener = BenchListener(HOST, port, TASK, known, said.append, command)
    served = Served(listener, port, said)
    stop = threading.Event()

    def serve() -> None:
        if once:
            served.codes.append(listener.serve(once=True))
        while not stop.is_set():
            listener.step()

    thread = threading.Thread(target=serve, name="kvferry-bench-listener")
    if start:
        thread.start()
    try:
        yield served
    finally:
        stop.set()
        if start:
            thread.join()
        listener.close()
