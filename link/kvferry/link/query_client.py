"""Queries other engines about prompts, on the thread of the side channel's client.

    PendingQueries ── StartQuery, StopQuery ───► QueryClient ── Subscribe, Unsubscribe ─────► producers
                   ◄── answers that change anything ────────── ◄── Answers ──────────────────
    PrefixSearches ── StartSearch, StopQuery ──►             ── FindPrefixes, Unsubscribe ──► who may have the prefix
                   ◄── one answer of each engine ───────────── ◄── Answers ──────────────────

Each producer is queried over its link, by a `QueriedProducer`: at the end of a turn of the loop, again over every new
connection, and again when it has not answered for a while, since its host may be gone. A producer that does not know a
prompt names the other data-parallel ranks of its engine, its *siblings*, which are queried too.

A search asks several engines under one number. The digests that it sends are made here, in parts, so that neither a
step nor a renewal waits for those of a long prompt. An engine of a version without prefix queries answers `Refused`,
which counts as not having answered.

Requests name producers, and producers name siblings, so both can be any ports. A producer that a request names keeps
its connection slot in use (`connection_slots.py`) as long as the query is open. A sibling does not, unless it knows the
prompt: its connection is closed as soon as its slot is needed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvferry.link import limits
from kvferry.link.commands import (
    SETTLING,
    Producer,
    QueryCommand,
    StartQuery,
    StartSearch,
)
from kvferry.link.limits import has_share
from kvferry.link.peer_link import PeerLink, PeerLinks
from kvferry.protocol.handshake import encode
from kvferry.protocol.hosts import one_spelling
from kvferry.protocol.queries import (
    MAX_QUERIES,
    Answer,
    Answers,
    PrefixQuery,
    PromptProgress,
    PromptQuery,
    Subscribe,
    Unsubscribe,
    prefix_messages,
)

OnAnswer = Callable[[Producer, Answer], None]

_TOKENS_AT_ONCE = 1 << 13
"""Tokens of which digests are made in one turn of the loop: 0.1 to 0.2 ms."""
_MAX_ENDED = 1 << 12
"""Most ended searches that are remembered for a ticket that was on its way; each engine has sent one at most."""


@dataclass(slots=True, eq=False)
class _OpenQuery:
    """An open query, and what producers have answered to it.

    Attributes:
        named: the producer that its request names; None for a search, which asks several.
        sent_to: the producers that are queried.
        settled_by: those that have answered a search, or cannot be reached.
        known_by: those that have the prompt in their queue.
        reported: the one of these that was passed on.
        has_answer: whether any answer was passed on.
        siblings_queried_s: when siblings were queried last.
    """

    query: Query
    named: Producer | None
    sent_to: set[Producer] = field(default_factory=set)
    settled_by: set[Producer] = field(default_factory=set)
    known_by: dict[Producer, None] = field(default_factory=dict)
    reported: Producer | None = None
    has_answer: bool = False
    siblings_queried_s: float | None = None


@dataclass(frozen=True, slots=True)
class QueryClientSnapshot:
    """The client at one moment.

    Attributes:
        open: numbers of the open queries.
        answered: those of them with an answer that was passed on.
        producers: numbers of the queries of each producer.
        siblings: producers that are queried only because others have named them.
        is_sending: whether a producer has to be told that a query is over.
    """

    open: frozenset[int]
    answered: frozenset[int]
    producers: Mapping[Producer, frozenset[int]]
    siblings: frozenset[Producer]
    is_sending: bool


class QueryClient:
    """Queries producers until the links are closed.

    Args:
        client_id: the announced id of this engine.
        on_answer: called on the links' thread with every answer that settles a query, and with those that change
            whether a producer knows its prompt. A producer that cannot be reached knows none of its prompts.
        on_found: the same for searches: called when an engine has something, and when it has said what. Also with a
            ticket that has come after the search's end.
    """

    def __init__(
        self,
        links: PeerLinks,
        client_id: str,
        on_answer: OnAnswer,
        on_found: OnAnswer = lambda producer, answer: None,
    ) -> None:
        self.client_id = client_id
        self._links = links
        self._on_answer = on_answer
        self._on_found = on_found
        self._open: dict[int, _OpenQuery] = {}
        self._by_producer: dict[Producer, QueriedProducer] = {}
        self._siblings_by_host: Counter[str] = Counter()
        # Searches: those whose digests are being made, and engines that may send a ticket after the end of one.
        self._growing: set[int] = set()
        self._ended: OrderedDict[tuple[Producer, int], None] = OrderedDict()

    def submit(self, commands: Iterable[QueryCommand]) -> None:
        """Hand over commands; returns at once."""
        submitted = tuple(commands)
        if submitted:
            self._links.client.call_soon(lambda: self._carry_out(submitted))

    # On the client's loop, as everything below.

    def snapshot(self) -> QueryClientSnapshot:
        """Which producers are queried now. May be called on another thread while the client's waits."""
        opened = dict(self._open)
        producers = dict(self._by_producer)
        return QueryClientSnapshot(
            open=frozenset(opened),
            answered=frozenset(
                number for number, query in opened.items() if query.has_answer
            ),
            producers={name: frozenset(one.queries) for name, one in producers.items()},
            siblings=frozenset(
                name for name, one in producers.items() if one.is_sibling
            ),
            is_sending=any(one.is_sending for one in producers.values()),
        )

    # For `QueriedProducer`.

    def take(self, queried: QueriedProducer, answers: Answers) -> None:
        """It has answered."""
        host, own_port = queried.producer
        siblings = [port for port in answers.siblings if port != own_port]
        for answer in answers.answers:
            if answer.number not in queried.queries:
                # Settled, or none of this producer's.
                self._answered_late(queried, answer)
                continue
            self._answered(queried, answer)
            opened = self._open[answer.number]
            is_named = opened.named == queried.producer
            if is_named and answer.progress is PromptProgress.UNKNOWN:
                self._start_siblings(opened, host, siblings)

    def refused(self, queried: QueriedProducer) -> None:
        """It does not know what it was sent: as all engines know the other queries, those of prefixes."""
        for number, query in list(queried.queries.items()):
            if isinstance(query, PrefixQuery):
                self._answered(
                    queried, Answer(number=number, progress=PromptProgress.UNKNOWN)
                )

    def failed(self, queried: QueriedProducer) -> None:
        """It cannot be reached, so it knows none of its prompts."""
        for number in list(queried.queries):
            self._answered(
                queried, Answer(number=number, progress=PromptProgress.UNKNOWN)
            )

    def forget(self, queried: QueriedProducer) -> None:
        """Its link is gone. It has no open queries, or is a sibling that knows none of the prompts."""
        if self._by_producer.get(queried.producer) is not queried:
            return
        del self._by_producer[queried.producer]
        if queried.is_sibling:
            self._end_sibling(queried)
        for number in queried.queries:
            opened = self._open[number]
            opened.sent_to.discard(queried.producer)
            opened.known_by.pop(queried.producer, None)

    def _carry_out(self, commands: tuple[QueryCommand, ...]) -> None:
        for command in commands:
            if isinstance(command, StartQuery):
                number = command.query.number
                opened = self._open.setdefault(
                    number, _OpenQuery(command.query, command.producer)
                )
                queried = self._start(opened, command.producer)
                self._need(queried, number)
            elif isinstance(command, StartSearch):
                self._growing.add(command.number)
                self._grow(command)
            else:
                self._stop(command.number)

    def _grow(self, search: StartSearch) -> None:
        """Make the next digests of a search, and send it once there are all."""
        if search.number not in self._growing:
            return  # stopped meanwhile
        chain = search.chain
        try:
            chain.grow(min(chain.num_tokens + _TOKENS_AT_ONCE, search.most_tokens))
        except ValueError:
            # A token that no vocabulary has: nobody has such a prompt. It must not end the other commands.
            self._growing.discard(search.number)
            for producer in search.producers:
                self._on_found(
                    producer, Answer(number=search.number, progress=PromptProgress.OVER)
                )
            return
        if chain.num_tokens < search.most_tokens:
            asyncio.get_running_loop().call_soon(self._grow, search)
            return
        self._growing.discard(search.number)
        query = PrefixQuery(
            number=search.number,
            chain=chain.encoded(search.most_tokens),
            min_tokens=search.min_tokens,
        )
        opened = _OpenQuery(query, None)
        self._open[search.number] = opened
        for producer in search.producers:
            self._need(self._start(opened, producer), search.number)

    def _start(
        self, opened: _OpenQuery, producer: Producer, *, is_sibling: bool = False
    ) -> QueriedProducer:
        queried = self._by_producer.get(producer)
        if queried is None:
            link = self._links.to(producer)
            queried = QueriedProducer(self, link, is_sibling=is_sibling)
            link.subscriber = queried
            self._by_producer[producer] = queried
            if is_sibling:
                self._siblings_by_host[one_spelling(producer[0])] += 1
        if opened.query.number not in queried.queries:
            opened.sent_to.add(producer)
            queried.start(opened.query)
        queried.update()
        return queried

    def _start_siblings(
        self, opened: _OpenQuery, host: str, ports: Iterable[int]
    ) -> None:
        # Siblings that were refused for lack of room get another chance with the next repetition.
        now_s = asyncio.get_running_loop().time()
        last_s = opened.siblings_queried_s
        if last_s is not None and now_s < last_s + limits.REPEAT_S:
            return
        opened.siblings_queried_s = now_s
        # One request was enough to take all connections, where a listener named 255 siblings: so they have shares, too.
        for port in islice(ports, limits.MAX_SIBLINGS_OF_ONE):
            is_queried = (host, port) in self._by_producer
            if is_queried or self._has_room_for_sibling(host):
                self._start(opened, (host, port), is_sibling=True)

    def _has_room_for_sibling(self, host: str) -> bool:
        num_of_host = self._siblings_by_host[one_spelling(host)]
        return has_share(
            num_of_host, self._siblings_by_host.total(), limits.MAX_SIBLINGS
        )

    def _need(self, queried: QueriedProducer, number: int) -> None:
        """The producer is needed for this query."""
        queried.needed_for.add(number)
        if queried.is_sibling:
            self._end_sibling(queried)
        queried.update()

    def _stop(self, number: int) -> None:
        self._growing.discard(number)
        opened = self._open.pop(number, None)
        if opened is None:
            return
        if isinstance(opened.query, PrefixQuery):
            self._expect_late_tickets(opened)
        queried_producers = [self._by_producer[producer] for producer in opened.sent_to]
        for queried in queried_producers:
            queried.stop(number)
        # Afterwards: a slot that is idle now may close the connection of another of them.
        for queried in queried_producers:
            queried.update()

    def _end_sibling(self, queried: QueriedProducer) -> None:
        queried.is_sibling = False
        host = one_spelling(queried.producer[0])
        self._siblings_by_host[host] -= 1
        if not self._siblings_by_host[host]:
            del self._siblings_by_host[host]

    def _answered(self, queried: QueriedProducer, answer: Answer) -> None:
        """Pass on an answer that changes something."""
        # Only such: a producer that repeats its answers must cost the engine nothing.
        opened = self._open[answer.number]
        if isinstance(opened.query, PrefixQuery):
            self._found(queried.producer, opened, answer)
            return
        producer = queried.producer
        is_first = not opened.has_answer
        opened.has_answer = True
        if answer.progress in SETTLING:
            self._on_answer(producer, answer)
        elif answer.progress is PromptProgress.QUEUED:
            opened.known_by[producer] = None
            if opened.reported is None:
                self._report(opened, producer)
        elif opened.reported == producer:
            self._lost(queried, opened, answer)
        else:
            opened.known_by.pop(producer, None)
            if is_first or answer.reason:
                self._on_answer(producer, answer)

    def _found(self, producer: Producer, opened: _OpenQuery, answer: Answer) -> None:
        """Pass on what an engine has said to a search: once, and before that once that it has something."""
        if producer in opened.settled_by:
            return
        if answer.progress is not PromptProgress.QUEUED:
            opened.settled_by.add(producer)
        elif producer in opened.known_by:
            return
        else:
            opened.known_by[producer] = None
        opened.has_answer = True
        self._on_found(producer, answer)

    def _expect_late_tickets(self, opened: _OpenQuery) -> None:
        for producer in opened.sent_to - opened.settled_by:
            self._ended[producer, opened.query.number] = None
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _answered_late(self, queried: QueriedProducer, answer: Answer) -> None:
        """Pass on a ticket of a search that has ended: its lease is to be given back."""
        key = (queried.producer, answer.number)
        if key in self._ended and answer.progress is PromptProgress.TICKET:
            del self._ended[key]
            self._on_found(queried.producer, answer)

    def _lost(
        self, queried: QueriedProducer, opened: _OpenQuery, answer: Answer
    ) -> None:
        """The producer that was passed on does not know the prompt any more."""
        producer = queried.producer
        del opened.known_by[producer]
        opened.reported = None
        if producer != opened.named:
            queried.needed_for.discard(answer.number)
            queried.update()
        # A prompt is known as long as one of the siblings knows it.
        other = next(iter(opened.known_by), None)
        if other is None:
            self._on_answer(producer, answer)
        else:
            self._report(opened, other)

    def _report(self, opened: _OpenQuery, producer: Producer) -> None:
        """Pass on that this producer has the prompt in its queue. It is needed from now on."""
        opened.reported = producer
        number = opened.query.number
        self._need(self._by_producer[producer], number)
        self._on_answer(producer, Answer(number=number, progress=PromptProgress.QUEUED))


# One producer.


Item = TypeVar("Item")

Query = PromptQuery | PrefixQuery


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
        self, client: QueryClient, link: PeerLink, *, is_sibling: bool
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
