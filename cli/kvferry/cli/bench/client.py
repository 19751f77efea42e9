"""`kvferry bench --connect`: joins a listener, runs the reader, and collects its results."""

from __future__ import annotations

import secrets as random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.cli.bench.child import READER, Child
from kvferry.cli.bench.messages import (
    CHECK,
    Alive,
    BenchFailed,
    Done,
    Echoes,
    Failed,
    FirstContact,
    FromChild,
    Join,
    Leave,
    Offer,
    Progress,
    Reads,
    Ready,
    Reply,
    Request,
    Task,
    decode_reply,
    encode,
)
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage, PeerRefused
from kvferry.protocol.handshake import Refused
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.worker.peers.handshake_client import exchange

START_S = 120.0
ALIVE_S = 2.0
_GRACE_S = 10.0
"""Added to the timeout of a read before the reader counts as hanging: it compares bytes in between."""
_RETRY_S = 0.3
_GOODBYE_S = 2.0


@dataclass
class Outcome:
    """The results. `lanes`: the transports, as UCX names them. `no_cuda`: why there is no GPU memory, by side."""

    host: str = ""
    lanes: str = ""
    no_cuda: dict[str, str] = field(default_factory=dict)
    first_contact_ms: float = 0.0
    reads: list[Reads] = field(default_factory=list)
    echoes: Echoes | None = None

    @property
    def wrong(self) -> int:
        """The number of wrong bytes."""
        return sum(reads.wrong for reads in self.reads)


@dataclass(frozen=True)
class Listener:
    """The listener's address, with the timeout and secrets for requests to it."""

    host: str
    port: int
    timeout_s: float
    secrets: Secrets

    def ask(self, request: Request, timeout_s: float | None = None) -> Reply:
        """Send one request and return the reply. Raises `BenchFailed`."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            return decode_reply(exchange(self.host, self.port, encode(request), limit_s, self.secrets))
        except PeerRefused as refused:
            raise BenchFailed(str(refused)) from None
        except (HandshakeFailed, InvalidMessage) as failed:
            raise BenchFailed(f"{failed}; does `kvferry bench --listen` run there? {CHECK}") from None

    def join(self, join: Join) -> Offer:
        """Join, with retries while the listener is busy. Raises `BenchFailed`."""
        end_s = time.monotonic() + self.timeout_s
        while True:
            reply = self.ask(join)
            if isinstance(reply, Offer):
                return reply
            if not isinstance(reply, Refused):
                raise BenchFailed(f"{self.host}:{self.port} answered with {type(reply).__name__}; {CHECK}")
            if reply.field != "listener" or time.monotonic() > end_s:
                raise BenchFailed(
                    f"{self.host}:{self.port} refused: {reply.field} is {reply.value!r} ({reply.expected})"
                )
            time.sleep(_RETRY_S)


def run_client(
    listener: Listener, task: Task, show: Callable[[Progress], None], command: Sequence[str] = READER
) -> Outcome:
    """Run the whole benchmark.

    Args:
        show: called with the progress.
        command: the arguments of Python that run the reader.

    Raises `BenchFailed`, with the error and the things to check in one line.
    """
    session = random.token_hex(16)
    outcome = Outcome()
    show(Progress(what=f"connecting to {listener.host}:{listener.port}", done=0, cases=0))
    listener.ask(Alive(session=session))  # always refused; it shows that a listener answers there
    reader = Child(command)
    joined = complete = False
    try:
        reader.tell(task)
        show(Progress(what="loading NIXL", done=0, cases=0))
        ready = _reported(reader, START_S)
        if not isinstance(ready, Ready):
            raise BenchFailed("the reader sent an unexpected message")
        me = socket.gethostname()[:256] or "unnamed"
        offer = listener.join(Join(session=session, host=me, agent_metadata=ready.agent_metadata))
        joined = True
        outcome.host = offer.host
        outcome.no_cuda = {side: why for side, why in (("here", ready.no_cuda), ("listener", offer.no_cuda)) if why}
        reader.tell(offer)
        for reported in _until_done(reader, listener, session, task.timeout_s):
            if isinstance(reported, Progress):
                show(reported)
            elif isinstance(reported, FirstContact):
                outcome.first_contact_ms = reported.ms
            elif isinstance(reported, Reads):
                outcome.reads.append(reported)
            elif isinstance(reported, Echoes):
                outcome.echoes = reported
        outcome.lanes = reader.lanes()
        complete = True
        return outcome
    finally:
        reader.close()
        if joined:
            _say_goodbye(listener, Leave(session=session, wrong=outcome.wrong, complete=complete))


def _until_done(reader: Child, listener: Listener, session: str, timeout_s: float) -> Iterator[FromChild]:
    """The reader's messages; keeps the listener's session alive meanwhile."""
    next_s = time.monotonic() + ALIVE_S
    received_s = time.monotonic()
    while True:
        reported = reader.take(max(0.0, min(0.25, next_s - time.monotonic())))
        now_s = time.monotonic()
        if isinstance(reported, Done):
            return
        if isinstance(reported, Failed):
            raise BenchFailed(f"{reported.reason}; {CHECK}")
        if reported is not None:
            received_s = now_s
            yield reported
        elif now_s - received_s > timeout_s + _GRACE_S:
            raise BenchFailed(f"NIXL hangs: no result for {now_s - received_s:.0f} s; {CHECK}")
        if now_s >= next_s:
            reply = listener.ask(Alive(session=session))
            if isinstance(reply, Refused):
                raise BenchFailed(f"the listener ended the session, most likely its NIXL process died; {CHECK}")
            next_s = time.monotonic() + ALIVE_S


def _reported(reader: Child, timeout_s: float) -> FromChild:
    reported = reader.take(timeout_s)
    if reported is None:
        raise BenchFailed(f"NIXL could not be loaded here within {timeout_s:g} s; see `kvferry doctor`")
    if isinstance(reported, Failed):
        raise BenchFailed(f"NIXL cannot be used here: {reported.reason}; see `kvferry doctor`")
    return reported


def _say_goodbye(listener: Listener, leave: Leave) -> None:
    try:
        listener.ask(leave, _GOODBYE_S)
    except BenchFailed:
        return  # the listener notices by itself, and the error was reported already
