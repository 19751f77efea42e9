"""A side channel that says what a test chooses to queries for prefixes, over real sockets and with real messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import msgspec

from kvferry.link.counters import Counters
from kvferry.link.secrets import Secrets
from kvferry.link.server import SideChannelListener
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.handshake import Release
from kvferry.protocol.params import RemotePrefill, read_params
from kvferry.protocol.queries import (
    Answer,
    Answers,
    FindPrefixes,
    PrefixQuery,
    PromptProgress,
    Unsubscribe,
    chain_bytes,
    encode_params,
)
from tests.link.channel import MessageInbox
from tests.ports import free_port
from tests.waiting import wait_until

Reply = Callable[[PrefixQuery], Answer | None]
"""The answer to a query; None says nothing."""


def over(reason: str = "no_prefix") -> Reply:
    """There is none, for this reason."""
    return lambda query: Answer(
        number=query.number, progress=PromptProgress.OVER, reason=reason
    )


def queued(query: PrefixQuery) -> Answer:
    """There is something, and no ticket yet."""
    return Answer(number=query.number, progress=PromptProgress.QUEUED)


def silent(_: PrefixQuery) -> None:
    """Nothing."""


def ticket(number: int, params: object) -> Answer:
    """These params, as a producer has put them into a response (`dict`), or as they are (bytes for hostile ones)."""
    if isinstance(params, dict):
        read = read_params(params)
        assert isinstance(read, RemotePrefill)
        params = read
    raw = msgspec.Raw(params) if isinstance(params, bytes) else encode_params(params)
    return Answer(number=number, progress=PromptProgress.TICKET, params=raw)


def has(params: object) -> Reply:
    """This lease, at once."""
    return lambda query: ticket(query.number, params)


def chain_of(prompt: Sequence[int]) -> bytes:
    """What an asker must present of a prompt."""
    whole = len(prompt) // 256 * 256
    return chain_bytes(digest_chain(Prompt(tokens=list(prompt)), whole))


class _Script:
    """The listener's port for prefixes (`kvferry.link.server.Prefixes`)."""

    def __init__(self, reply: Reply) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.reply = reply
        self.lock = threading.Lock()
        self.queries: list[PrefixQuery] = []
        self.unsubscribed: list[int] = []
        self.peers: dict[int, bytes] = {}
        self._late: list[tuple[bytes, Answers]] = []

    @property
    def has_news(self) -> bool:
        return bool(self._late)

    def find(self, peer: bytes, request: FindPrefixes) -> Answers:
        with self.lock:
            self.queries += request.queries
            self.peers.update((query.number, peer) for query in request.queries)
            answers = [self.reply(query) for query in request.queries]
        return Answers(answers=tuple(answer for answer in answers if answer))

    def unsubscribe(self, request: Unsubscribe) -> None:
        with self.lock:
            self.unsubscribed += request.numbers

    def changes(self) -> list[tuple[bytes, Answers]]:
        with self.lock:
            late = self._late
            self._late = []
        return late

    def say(self, answers: Sequence[Answer]) -> None:
        with self.lock:
            peer = self.peers[answers[0].number]
            self._late.append((peer, Answers(answers=tuple(answers))))
        self.wake()


class ScriptedAnswerer:
    """Listens on a port of its own until `close`. `reply` may be changed at any time.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self, reply: Reply, *, host: str = "127.0.0.1", secrets: Secrets = ()
    ) -> None:
        self.port = free_port()
        self.host = host
        self._script = _Script(reply)
        self._inbox = MessageInbox()
        self._listener = SideChannelListener(
            host,
            self.port,
            Counters(),
            secrets,
            prefixes=self._script,
            inbox=self._inbox,
        )
        self.close = self._listener.close

    @property
    def source(self) -> dict[str, object]:
        """As llm-d's sidecar names it."""
        return {
            "kv_request_id": "7b0c",
            "remote_host": self.host,
            "remote_port": self.port,
        }

    @property
    def queries(self) -> list[PrefixQuery]:
        """What it was asked, repetitions too."""
        with self._script.lock:
            return list(self._script.queries)

    @property
    def unsubscribed(self) -> list[int]:
        """The numbers that it needs to answer no more."""
        with self._script.lock:
            return list(self._script.unsubscribed)

    def set_reply(self, reply: Reply) -> None:
        """Answer so from now on."""
        with self._script.lock:
            self._script.reply = reply

    def say(self, *answers: Answer) -> None:
        """Send answers now, in one message, to who has asked under their numbers."""
        self._script.say(answers)

    def wait_for_queries(self, count: int = 1) -> list[PrefixQuery]:
        """Wait until it was asked so often."""
        wait_until(lambda: len(self.queries) >= count, f"{count} queries")
        return self.queries

    def released(self) -> list[str]:
        """The epochs of the leases that were given back to it so far."""
        epochs: list[str] = []
        while True:
            try:
                message = self._inbox.get()
            except queue.Empty:
                return epochs
            if isinstance(message, Release):
                epochs += [name.epoch for name in message.leases]
