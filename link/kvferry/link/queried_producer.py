"""A producer that is queried: what is sent to it, and sent again, over its link.

start, stop ──► at the end of the turn: Subscribe, FindPrefixes, Unsubscribe ──► producer
                again over every new connection, and every `REPEAT_S` without an answer: its host may be gone
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from kvferry.link import limits
from kvferry.link.commands import Producer
from kvferry.link.peer_link import PeerLink
from kvferry.protocol.handshake import encode
from kvferry.protocol.queries import (
    MAX_QUERIES,
    Answers,
    PrefixQuery,
    PromptQuery,
    Subscribe,
    Unsubscribe,
    prefix_messages,
)

Item = TypeVar("Item")

Query = PromptQuery | PrefixQuery


class AnswerTaker(Protocol):
    """Who queries producers (`QueryClient`).

    Attributes:
        client_id: the announced id of this engine.
    """

    client_id: str

    def take(self, queried: QueriedProducer, answers: Answers) -> None:
        """It has answered."""

    def refused(self, queried: QueriedProducer) -> None:
        """It does not know one of the messages."""

    def failed(self, queried: QueriedProducer) -> None:
        """It cannot be reached."""

    def forget(self, queried: QueriedProducer) -> None:
        """Its link is gone."""


class QueriedProducer:
    """A producer with open queries, or with a connection that is kept for the next: the `Subscriber` of its link.

    Open queries are sent over every new connection, and again every `REPEAT_S`.

    Attributes:
        queries: the open ones, by number.
        needed_for: the queries whose requests name it, or of which it knows the prompt. Without any it is a sibling
            that may be given up.
        is_sibling: other producers have named it, and it was never needed.
    """

    def __init__(
        self, client: AnswerTaker, link: PeerLink, *, is_sibling: bool
    ) -> None:
        self.producer: Producer = link.address
        self.queries: dict[int, Query] = {}
        self.needed_for: set[int] = set()
        self.is_sibling = is_sibling
        self._client = client
        self._link = link
        self._unsent: list[Query] = []
        self._unsubscribed: list[int] = []
        self._is_sending = False
        self._has_answered = False
        self._repeat_timer: asyncio.TimerHandle | None = None

    @property
    def has_queries(self) -> bool:
        return bool(self.queries)

    @property
    def is_needed(self) -> bool:
        return bool(self.needed_for)

    @property
    def is_sending(self) -> bool:
        """Whether something is sent at the end of this turn of the loop."""
        return self._is_sending

    def start(self, query: Query) -> None:
        """Open a query; `update` must follow."""
        self.queries[query.number] = query
        self._unsent.append(query)
        self._send_soon()

    def stop(self, number: int) -> None:
        """End a query; `update` must follow."""
        del self.queries[number]
        self.needed_for.discard(number)
        if self._link.peer is not None:
            self._unsubscribed.append(number)
            self._send_soon()

    def update(self) -> None:
        """`queries`, `needed_for` or `is_sibling` has changed."""
        self._link.update()

    # For its link.

    def connected(self) -> None:
        self._unsent = list(self.queries.values())
        self._send()

    def received(self, answers: Answers) -> None:
        self._has_answered = True
        self._client.take(self, answers)

    def refused(self) -> None:
        self._client.refused(self)

    def failed(self) -> None:
        self._stop_timer()
        self._client.failed(self)

    def closed(self) -> None:
        self._stop_timer()
        self._client.forget(self)

    def _send_soon(self) -> None:
        # At the end of this turn, so that what is started and stopped together goes in one message.
        if not self._is_sending:
            self._is_sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_sending = False
        peer = self._link.peer
        if peer is None:
            return
        unsent = [query for query in self._unsent if query.number in self.queries]
        self._unsent = []
        unsubscribed = self._unsubscribed
        self._unsubscribed = []
        client_id = self._client.client_id
        of_prompts = [query for query in unsent if isinstance(query, PromptQuery)]
        of_prefixes = [query for query in unsent if isinstance(query, PrefixQuery)]
        for queries in _messages(of_prompts):
            peer.send_queries(encode(Subscribe(client_id=client_id, queries=queries)))
        for message in prefix_messages(client_id, of_prefixes):
            peer.send_queries(encode(message))
        for numbers in _messages(unsubscribed):
            peer.send_queries(encode(Unsubscribe(client_id=client_id, numbers=numbers)))
        if not self.queries:
            self._stop_timer()
        elif self._repeat_timer is None:
            self._wait_to_repeat()

    def _wait_to_repeat(self) -> None:
        self._has_answered = False
        loop = asyncio.get_running_loop()
        self._repeat_timer = loop.call_later(limits.REPEAT_S, self._repeat)

    def _stop_timer(self) -> None:
        if self._repeat_timer is not None:
            self._repeat_timer.cancel()
            self._repeat_timer = None

    def _repeat(self) -> None:
        self._repeat_timer = None
        peer = self._link.peer
        if peer is not None and not self._has_answered:
            # Its host may be gone, which TCP notices much later.
            peer.end(f"has not answered for {limits.REPEAT_S:g} s")
            return
        self._unsent = list(self.queries.values())
        self._send()


def _messages(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """The items, as many at a time as fit into a message."""
    for start in range(0, len(items), MAX_QUERIES):
        yield tuple(items[start : start + MAX_QUERIES])
