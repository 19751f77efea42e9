"""The side channel's listener: one ZMQ ROUTER socket, one thread, in the scheduler's process.

| message | what the listener does |
| --- | --- |
| `Hello` | answers with this engine's description |
| `Subscribe`, `Unsubscribe` | answers with the progress of prompts, again whenever that changes |
| `FindPrefixes` | answers whether this engine has leading tokens of prompts in its cache |
| `Renew`, `Release` | puts them into an inbox, for the next step |
| anything else | counts it, answers `Refused` where an answer is possible, and drops it |

It also winds the clock of leases, since an idle engine takes no steps. With secrets it serves only peers that have one
of them. No input ends the thread. All that waits is bounded: leases, answers and log lines.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from kvferry.link import limits
from kvferry.link.awake_clock import AwakeClock
from kvferry.link.commands import LeaseInbox, LeaseMessage
from kvferry.link.counters import Counters
from kvferry.link.guarded_socket import AcceptedConnectionsSnapshot, GuardedSocket
from kvferry.link.host_names import listening_address
from kvferry.link.secrets import Secrets
from kvferry.protocol.errors import InvalidConfig, InvalidMessage
from kvferry.protocol.handshake import (
    CHANNEL_VERSION,
    MAX_REQUEST_BYTES,
    UNKNOWN_ENGINE,
    EngineDescription,
    Hello,
    LeaseName,
    PartsSent,
    Refused,
    Renew,
    Request,
    decode_request,
    encode,
    zmq_address,
)
from kvferry.protocol.hosts import host_port
from kvferry.protocol.queries import (
    MAX_QUERIES,
    Answer,
    Answers,
    FindPrefixes,
    PrefixRefusal,
    PromptProgress,
    Subscribe,
    Unsubscribe,
)

logger = logging.getLogger(__name__)

_ADDRESS_VARIABLES = "VLLM_NIXL_SIDE_CHANNEL_HOST:VLLM_NIXL_SIDE_CHANNEL_PORT"
_NUM_PORTS = 1 << 16


class Prompts(Protocol):
    """The prompts that peers query (`scheduler/producer/prompt_directory.py`). Used on the listener's thread.

    Attributes:
        wake: called on any thread when there may be `changes` to send.
        has_news: whether something has changed since the last `subscribe` or `changes`.
    """

    wake: Callable[[], None]

    @property
    def has_news(self) -> bool: ...

    def subscribe(self, peer: bytes, request: Subscribe) -> Answers:
        """Answer queries of this connection, and remember them until they are settled."""

    def unsubscribe(self, request: Unsubscribe) -> None:
        """These queries are settled."""

    def changes(self) -> list[tuple[bytes, Answers]]:
        """New answers to remembered queries since the last call, by connection."""


class NoPrompts:
    """For a listener of an engine that prefills for no other: it knows no prompt, and nothing changes."""

    has_news = False

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    def subscribe(self, peer: bytes, request: Subscribe) -> Answers:
        unknown = PromptProgress.UNKNOWN
        answers = [
            Answer(number=query.number, progress=unknown) for query in request.queries
        ]
        return Answers(answers=tuple(answers), siblings=())

    def unsubscribe(self, request: Unsubscribe) -> None:
        pass

    def changes(self) -> list[tuple[bytes, Answers]]:
        return []


class Prefixes(Protocol):
    """The prefixes that peers query. Used on the listener's thread.

    Attributes:
        wake: called on any thread when there may be `changes` to send.
        has_news: whether something has changed since the last `find` or `changes`.
    """

    wake: Callable[[], None]

    @property
    def has_news(self) -> bool: ...

    def find(self, peer: bytes, request: FindPrefixes) -> Answers:
        """Answer queries of this connection, and remember them until they are settled."""

    def unsubscribe(self, request: Unsubscribe) -> None:
        """These queries are settled. Numbers of other queries are ignored."""

    def changes(self) -> list[tuple[bytes, Answers]]:
        """New answers to remembered queries since the last call, by connection."""


class NoPrefixes:
    """For a listener of an engine of which no prefixes are read."""

    has_news = False

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    def find(self, peer: bytes, request: FindPrefixes) -> Answers:
        answers = [
            Answer(
                number=query.number,
                progress=PromptProgress.OVER,
                reason=PrefixRefusal.PREFIX_OFF.value,
            )
            for query in request.queries
        ]
        return Answers(answers=tuple(answers))

    def unsubscribe(self, request: Unsubscribe) -> None:
        pass

    def changes(self) -> list[tuple[bytes, Answers]]:
        return []


class SideChannelListener:
    """Serves one engine's side channel until `close`.

    Args:
        host, port: where to listen.
        counters: counts `handshakes_served`, `bad_frames`, `dropped_messages`, `side_channel_refusals`, and messages
            about unknown leases as `renewals_unknown` and `releases_unknown`.
        secrets: the first is this listener's own; peers may have any of them. Without secrets every peer is served.
        clock: wound here every `period_s`; gives the times of arrival of renewals.
        run_due: called on the listener's thread after every winding; it must not wait.
        knows: called on the listener's thread with boot and name: whether there is such a lease.
        directory: the prompts that peers query.
        prefixes: the prefixes that peers query.
        inbox: where renewals and releases go; messages may come before this object is whole.

    Attributes:
        address: where it listens; that of `host` if that is a name.
        has_query_clients: whether an engine that queries prompts has shaken hands.

    Raises:
        InvalidConfig: the address cannot be bound, or ZMQ has no CURVE; the text names the setting to change.
        RuntimeError: the system gives no more threads.
    """

    def __init__(
        self,
        host: str,
        port: int,
        counters: Counters,
        secrets: Secrets = (),
        clock: AwakeClock | None = None,
        run_due: Callable[[], None] = lambda: None,
        knows: Callable[[str, LeaseName], bool] = lambda boot, name: True,
        directory: Prompts | None = None,
        prefixes: Prefixes | None = None,
        inbox: LeaseInbox | None = None,
    ) -> None:
        self.inbox = LeaseInbox() if inbox is None else inbox
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._directory = directory or NoPrompts()
        self._directory.wake = self._wake
        self._prefixes = prefixes or NoPrefixes()
        self._prefixes.wake = self._wake
        self.has_query_clients = False
        self._clock = clock
        self._run_due = run_due
        self._knows = knows
        self._counters = counters
        self._published: tuple[EngineDescription, PartsSent] | None = None
        self._why_not_published = "starting"
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._wakeup)
            if not 0 < port < _NUM_PORTS:
                # ZMQ takes any number: for 0 it listens on some free port, and for 65538 on port 2. Params with the
                # number itself are refused by every consumer.
                raise InvalidConfig(
                    _ADDRESS_VARIABLES,
                    host_port(host, port),
                    f"a port from 1 to {_NUM_PORTS - 1}, to which the data-parallel rank is added",
                )
            try:
                self.address = listening_address(host)
                self._socket = GuardedSocket(
                    self.address,
                    port,
                    MAX_REQUEST_BYTES,
                    secrets,
                    counters,
                    self._answer_one,
                )
            except (OSError, zmq.ZMQError) as refused:
                raise InvalidConfig(
                    _ADDRESS_VARIABLES,
                    host_port(host, port),
                    f"an address of this machine with a free port ({refused}); every engine of a host needs its own",
                ) from None
            undo.callback(self._socket.close)
            self._socket.watch(self._wakeup)
            self._thread = threading.Thread(
                target=self._serve, name="kvferry-listener", daemon=True
            )
            self._thread.start()
            undo.pop_all()
        secured = "without a secret"
        if secrets:
            secured = f"with secret {secrets[0].fingerprint}"
        logger.info(
            "side channel listens on %s %s",
            zmq_address(self.address, port),
            secured,
        )

    def publish(self, description: EngineDescription) -> None:
        """Answer with this description from now on. Before that, `Hello` is refused with "starting"."""
        self._published = (description, PartsSent(encode(description)))

    def withdraw(self) -> None:
        """Refuse `Hello` with "asleep", until `publish`.

        Waits, at most `CONTACTS_S`, until every peer that was described this engine has connected to its agents or has
        given up: afterwards they may close.
        """
        self._why_not_published = "asleep"
        self._published = None
        if not self._socket.wait_for_contacts(limits.CONTACTS_S):
            logger.warning(
                "side channel: a peer has not connected within %g s; nobody waits for it",
                limits.CONTACTS_S,
            )

    def snapshot(self) -> AcceptedConnectionsSnapshot:
        """Its connections now."""
        return self._socket.snapshot()

    def close(self) -> None:
        """Stop the thread and free the port. Idempotent."""
        if not self._thread.is_alive():
            return
        self._is_closing = True
        self._wake()
        self._thread.join(limits.JOIN_S)
        # First out of reach, then closed: `_wake` is called on other threads, and the number may be used again.
        wakeup = self._wakeup
        self._wakeup = -1
        os.close(wakeup)

    def _serve(self) -> None:
        period_ms = None
        if self._clock is not None:
            period_ms = math.ceil(self._clock.period_s * 1000)
        while not self._is_closing:
            ready = self._socket.poll(period_ms)
            self._wind()
            self._socket.guarded(self._run_due)
            self._socket.serve(ready)
            is_woken = self._wakeup in ready
            if is_woken:
                os.eventfd_read(self._wakeup)
            # Also when nothing came: old prompts and queries are forgotten although no other follows.
            has_news = self._directory.has_news or self._prefixes.has_news
            if is_woken or has_news or not ready:
                self._socket.guarded(self._send_changes)
        self._socket.close()

    def _wind(self) -> float | None:
        if self._clock is None:
            return None
        return self._clock.wind(time.monotonic())

    def _answer_one(self, client_id: bytes, body: bytes) -> None:
        try:
            self._answer(client_id, decode_request(body))
        except InvalidMessage as invalid:
            self._socket.bad_frame(str(invalid))
            refusal = _refused(
                invalid.field[: limits.MAX_SHOWN],
                invalid.shown_value[: limits.MAX_SHOWN],
                invalid.expected[: limits.MAX_SHOWN],
            )
            self._socket.send(client_id, refusal)

    def _answer(self, client_id: bytes, request: Request) -> None:
        if isinstance(request, Hello):
            self._socket.send(client_id, self._answer_hello(request))
        elif isinstance(request, Subscribe):
            self._send_answers(client_id, self._directory.subscribe(client_id, request))
        elif isinstance(request, Unsubscribe):
            self._directory.unsubscribe(request)
            self._prefixes.unsubscribe(request)
        elif isinstance(request, FindPrefixes):
            self._send_answers(client_id, self._prefixes.find(client_id, request))
        else:
            self._put_into_inbox(request)

    def _wake(self) -> None:
        """Called on the engine's thread: there are changes, or the thread is to end."""
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    def _send_changes(self) -> None:
        for changed in (self._directory, self._prefixes):
            for peer, answers in changed.changes():
                self._send_answers(peer, answers)

    def _send_answers(self, peer: bytes, answers: Answers) -> None:
        """Send answers, in several frames where one would be too long."""
        # A frame that is too long would cost the peer its connection, each time that it connects again.
        frame: list[Answer] = []
        frame_bytes = 0
        for answer in answers.answers:
            answer_bytes = memoryview(answer.params).nbytes + limits.ANSWER_BYTES
            is_full = (
                len(frame) == MAX_QUERIES
                or frame_bytes + answer_bytes > limits.SHARED_FRAME_BYTES
            )
            if frame and is_full:
                self._send_frame(peer, answers, frame)
                frame = []
                frame_bytes = 0
            frame.append(answer)
            frame_bytes += answer_bytes
        self._send_frame(peer, answers, frame)

    def _send_frame(self, peer: bytes, answers: Answers, frame: list[Answer]) -> None:
        answers = msgspec.structs.replace(answers, answers=tuple(frame))
        self._socket.send(peer, encode(answers))

    def _put_into_inbox(self, message: LeaseMessage) -> None:
        # Unknown leases are dropped here and not in the step: a flood of messages about them cannot make a step longer
        # than the leases require.
        known = tuple(
            name for name in message.leases if self._knows(message.boot, name)
        )
        num_unknown = len(message.leases) - len(known)
        if num_unknown:
            metric = "releases_unknown"
            if isinstance(message, Renew):
                metric = "renewals_unknown"
            self._counters.add(metric, amount=num_unknown)
            message = msgspec.structs.replace(message, leases=known)
        if known and not self.inbox.put(message, self._wind()):
            self._counters.add("dropped_messages")

    def _answer_hello(self, hello: Hello) -> bytes:
        # Before it is looked whether there is an answer, since `withdraw` takes the answer away before it looks whether
        # there is a contact: one of the two sees the other.
        if hello.connects:
            self._socket.begin_contact()
        published = self._published
        if published is None:
            return _refused(
                "engine", self._why_not_published, "an engine whose workers are ready"
            )
        description, parts = published
        if hello.version != CHANNEL_VERSION:
            return _refused("version", str(hello.version), str(CHANNEL_VERSION))
        if hello.engine_id not in (description.engine_id, UNKNOWN_ENGINE):
            return _refused("engine_id", hello.engine_id, description.engine_id)
        self.has_query_clients |= hello.queries_prompts
        answer = parts.answer(hello.at)
        # A later part belongs to a handshake that is counted already.
        if not hello.at:
            self._counters.add("handshakes_served")
            logger.debug("side channel: described this engine to %s", hello.client_id)
        return answer


def _refused(field: str, value: str, expected: str) -> bytes:
    return encode(Refused(field=field, value=value, expected=expected))
