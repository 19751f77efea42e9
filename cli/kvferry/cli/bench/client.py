"""`kvferry bench --connect`: joins a listener and lets a reader read its memory."""

from __future__ import annotations

import contextlib
import secrets as random
import socket
import time
from collections.abc import Callable, Sequence

from kvferry.cli.transfer.child import COMMAND, Child, Outcome, measure
from kvferry.cli.transfer.messages import (
    Alive,
    CaseProgress,
    Join,
    Leave,
    ReadableAgent,
    ReadsFailed,
    Reply,
    Request,
    Task,
    decode_reply,
    encode_frame,
)
from kvferry.link.allowed_hosts import ANY_HOST
from kvferry.link.client import SideChannelClient
from kvferry.link.secrets import Secrets
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, KvferryError
from kvferry.protocol.handshake import Refused
from kvferry.protocol.hosts import host_port

ALIVE_S = 2.0
CHECK = "check the port, firewalls between, UCX_NET_DEVICES and `kvferry doctor` on both machines"
_RETRY_S = 0.3
_GOODBYE_S = 2.0


class ListenerSession:
    """One client's visit to a listener, which ends it unless `keep_alive` is called often.

    Every method raises `ReadsFailed`, or `PeerRefused` if the secrets of both ends do not match.
    """

    def __init__(
        self, host: str, port: int, timeout_s: float, secrets: Secrets
    ) -> None:
        self.name = random.token_hex(16)
        self.has_joined = False
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._secrets = secrets
        self._where = host_port(host, port)
        self._next_s = 0.0

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Send one request and return the reply."""
        # A client for each request: one in two seconds, and none that a frozen listener has kept waiting is used again.
        frame = encode_frame(request)
        try:
            with SideChannelClient(self._secrets, ANY_HOST) as client:
                return decode_reply(
                    client.exchange(self._host, self._port, frame, timeout_s)
                )
        except (HandshakeFailed, InvalidMessage) as failed:
            raise ReadsFailed(
                f"{failed}; run `kvferry bench --listen` there first"
            ) from None

    def join(self, agent_metadata: bytes) -> ReadableAgent:
        """Join, with retries while the listener starts."""
        end_s = time.monotonic() + self._timeout_s
        join = Join(
            session=self.name,
            host=socket.gethostname()[:256] or "unnamed",
            agent_metadata=agent_metadata,
        )
        while True:
            reply = self.ask(join, self._timeout_s)
            if isinstance(reply, ReadableAgent):
                self.has_joined = True
                return reply
            if not isinstance(reply, Refused):
                raise ReadsFailed(f"{self._where} answered with {type(reply).__name__}")
            if reply.field != "listener" or time.monotonic() > end_s:
                why = f"{reply.field} is {reply.value!r} ({reply.expected})"
                raise ReadsFailed(f"{self._where} refused: {why}")
            # Both ends are often started at once, and loading NIXL takes seconds.
            time.sleep(_RETRY_S)

    def keep_alive(self) -> None:
        """Send a sign of life from time to time."""
        if time.monotonic() < self._next_s:
            return
        reply = self.ask(Alive(session=self.name), self._timeout_s)
        # Before joining it is refused, but shows that a listener answers.
        if isinstance(reply, Refused) and self.has_joined:
            raise ReadsFailed(f"the listener's session is {reply.value}")
        self._next_s = time.monotonic() + ALIVE_S

    def leave(self, outcome: Outcome | None) -> None:
        """Give the listener the result; None: there is none."""
        wrong = outcome.measured.wrong if outcome is not None else 0
        leave = Leave(session=self.name, wrong=wrong, complete=outcome is not None)
        # If it is lost, the listener notices by itself that the client is silent.
        with contextlib.suppress(KvferryError):
            self.ask(leave, _GOODBYE_S)


def run_client(
    session: ListenerSession,
    task: Task,
    show: Callable[[CaseProgress], None],
    command: Sequence[str] = COMMAND,
) -> Outcome:
    """Run the whole benchmark.

    Args:
        show: called with the progress.
        command: the arguments of Python that run the reader.

    Raises:
        ReadsFailed: it could not be run; with the things to check, in one line.
        PeerRefused: the secrets of both ends do not match.
    """
    outcome = None
    try:
        session.keep_alive()
        with contextlib.closing(Child(command)) as reader:
            outcome = measure(reader, task, session.join, show, session.keep_alive)
    except ReadsFailed as failed:
        raise ReadsFailed(f"{failed}; {CHECK}") from None
    finally:
        if session.has_joined:
            session.leave(outcome)
    return outcome
