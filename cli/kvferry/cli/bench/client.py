"""`kvferry bench --connect`: joins a listener and lets a reader read its memory."""

from __future__ import annotations

import contextlib
import secrets as random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.cli.bench.messages import Alive, Join, Leave, Reply, Request, decode_reply, encode
from kvferry.cli.transfer.child import COMMAND, Child
from kvferry.cli.transfer.measure import Outcome, measure
from kvferry.cli.transfer.messages import Offer, Progress, ReadsFailed, Task
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, KvferryError
from kvferry.protocol.handshake import Refused
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.secrets import Secrets

ALIVE_S = 2.0
CHECK = "check the port, firewalls between, UCX_NET_DEVICES and `kvferry doctor` on both machines"
_RETRY_S = 0.3
_GOODBYE_S = 2.0


@dataclass(frozen=True)
class Listener:
    """The listener's address, with the timeout and secrets for requests to it."""

    host: str
    port: int
    timeout_s: float
    secrets: Secrets

    def ask(self, request: Request, timeout_s: float | None = None) -> Reply:
        """Send one request and return the reply. Raises `ReadsFailed`, or `PeerRefused` if the secrets do not match."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            with SideChannelClient(self.secrets) as client:
                return decode_reply(client.exchange(self.host, self.port, encode(request), limit_s))
        except (HandshakeFailed, InvalidMessage) as failed:
            raise ReadsFailed(f"{failed}; does `kvferry bench --listen` run there?") from None

    def join(self, join: Join) -> Offer:
        """Join, with retries while the listener is busy. Raises as `ask`."""
        end_s = time.monotonic() + self.timeout_s
        while True:
            reply = self.ask(join)
            if isinstance(reply, Offer):
                return reply
            if not isinstance(reply, Refused):
                raise ReadsFailed(f"{self.host}:{self.port} answered with {type(reply).__name__}")
            if reply.field != "listener" or time.monotonic() > end_s:
                raise ReadsFailed(
                    f"{self.host}:{self.port} refused: {reply.field} is {reply.value!r} ({reply.expected})"
                )
            time.sleep(_RETRY_S)


class _Session:
    """One client's visit to a listener, which ends it unless `keep_alive` is called often."""

    def __init__(self, listener: Listener) -> None:
        self.joined = False
        self._listener = listener
        self._session = random.token_hex(16)
        self._next_s = 0.0

    def join(self, agent_metadata: bytes) -> Offer:
        """Join, and get the listener's offer."""
        me = socket.gethostname()[:256] or "unnamed"
        offer = self._listener.join(Join(session=self._session, host=me, agent_metadata=agent_metadata))
        self.joined = True
        return offer

    def keep_alive(self) -> None:
        """Tell the listener from time to time that the session goes on."""
        if time.monotonic() >= self._next_s:
            if isinstance(self._listener.ask(Alive(session=self._session)), Refused) and self.joined:
                raise ReadsFailed("the listener ended the session, most likely its NIXL process died")
            self._next_s = time.monotonic() + ALIVE_S

    def leave(self, outcome: Outcome | None) -> None:
        """Give the listener the result; None: there is none."""
        wrong = 0 if outcome is None else outcome.measured.wrong
        with contextlib.suppress(KvferryError):  # the listener notices by itself
            leave = Leave(session=self._session, wrong=wrong, complete=outcome is not None)
            self._listener.ask(leave, _GOODBYE_S)


def run_client(
    listener: Listener, task: Task, show: Callable[[Progress], None], command: Sequence[str] = COMMAND
) -> Outcome:
    """Run the whole benchmark.

    Args:
        show: called with the progress.
        command: the arguments of Python that run the reader.

    Raises:
        ReadsFailed: it could not be run; with the things to check, in one line.
        PeerRefused: the secrets of both ends do not match.
    """
    show(Progress(what=f"connecting to {listener.host}:{listener.port}"))
    session = _Session(listener)
    outcome = None
    try:
        session.keep_alive()  # before joining it is refused, which shows that a listener answers there
        with contextlib.closing(Child(command)) as reader:
            outcome = measure(reader, task, session.join, show, session.keep_alive)
    except ReadsFailed as failed:
        raise ReadsFailed(f"{failed}; {CHECK}") from None
    finally:
        if session.joined:
            session.leave(outcome)
    return outcome
