"""Both ends of the side channel: a listener that keeps whole messages, and a client that can send any bytes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.client import SideChannelClient
from kvferry.link.commands import LeaseInbox, LeaseMessage
from kvferry.link.counters import Counters
from kvferry.link.peer_link import PeerLinks
from kvferry.link.renewer import LeaseRenewer
from kvferry.link.secrets import Secrets
from kvferry.link.server import SideChannelListener
from kvferry.protocol.handshake import (
    CHANNEL_VERSION,
    EngineDescription,
    Hello,
    Refused,
    decode_reply,
    encode,
)
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from tests.ports import free_port as free_port

HOST = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"
_HOSTS_OF_A_BYTE = 250


class MessageInbox(LeaseInbox):
    """First in, first out; nothing is merged or dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: queue.SimpleQueue[LeaseMessage] = queue.SimpleQueue()

    def put(self, message: LeaseMessage, received_s: float | None = None) -> bool:
        self._messages.put(message)
        return True

    def get(self, timeout: float = 0.0) -> LeaseMessage:
        """The oldest. Raises `queue.Empty` after `timeout` seconds."""
        return (
            self._messages.get(timeout=timeout)
            if timeout
            else self._messages.get_nowait()
        )

    def qsize(self) -> int:
        return self._messages.qsize()

    def empty(self) -> bool:
        return self._messages.empty()


class RecordingListener(SideChannelListener):
    """Its inbox gives whole messages."""

    inbox: MessageInbox

    def __init__(
        self, host: str, port: int, counters: Counters, secrets: Secrets = ()
    ) -> None:
        # Given, not set afterwards: a peer that waits for this port sends its messages while this line still runs, and
        # they would be in another inbox.
        self.inbox = MessageInbox()
        super().__init__(
            host, port, counters, secrets, directory=PromptDirectory(), inbox=self.inbox
        )


@contextmanager
def listening(
    counters: Counters | None = None,
    secrets: Secrets = (),
    *,
    description: EngineDescription | None = None,
    host: str = HOST,
) -> Iterator[tuple[RecordingListener, int]]:
    """A listener on a free port, closed at the end; it is starting where there is no description."""
    port = free_port()
    listener = RecordingListener(host, port, counters or Counters(), secrets)
    if description is not None:
        listener.publish(description)
    try:
        yield listener, port
    finally:
        listener.close()


def many_hosts(count: int) -> list[str]:
    """Addresses of this machine, which a listener on `ANY_ADDRESS` has: a peer each."""
    hosts = []
    for number in range(count):
        high, low = divmod(number, _HOSTS_OF_A_BYTE)
        hosts.append(f"127.0.{1 + high}.{1 + low}")
    return hosts


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


def ask(
    port: int,
    engine_id: str = "prefill-0",
    version: int = CHANNEL_VERSION,
    host: str = HOST,
) -> EngineDescription | Refused:
    """One handshake over a socket of its own."""
    with client(port, zmq.REQ, host=host) as sock:
        sock.send(encode(Hello(engine_id=engine_id, client_id="test", version=version)))
        return decode_reply(sock.recv())


def renewing(
    counters: Counters, secrets: Secrets = (), allowed: AllowedHosts | None = None
) -> LeaseRenewer:
    """A renewer with links of its own, which it closes."""
    return LeaseRenewer(PeerLinks(SideChannelClient(secrets, allowed), counters))


BEFORE: set[threading.Thread] = set()
"""Threads that other tests of this process have left; set before every test."""


def threads_named(name: str) -> list[threading.Thread]:
    """Running threads with this name, except those that existed before the test."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == name and thread not in BEFORE
    ]
