"""Queries producers about prompts that they are prefilling, on the thread of the side channel's client.

    PendingQueries ── StartQuery, StopQuery ──► QueryClient ── Subscribe, Unsubscribe ──► producers
                   ◄── answers that change anything ───────── ◄── Answers ───────────────

Each producer has a task with a connection. A producer that does not know a prompt names the other data-parallel ranks
of its engine, its *siblings*, which are queried too.

Requests name producers, and producers name siblings, so both can be any ports. A producer that a request names keeps
its connection slot in use (`connection_slots.py`) as long as the query is open. A sibling does not, unless it knows the
prompt: its connection is closed as soon as its slot is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from kvferry.link import limits
from kvferry.link.client import SideChannelClient
from kvferry.link.connection import Connection, within
from kvferry.link.connection_slots import (
    ConnectionSlot,
    ConnectionSlots,
    Kind,
    ProvenAddresses,
)
from kvferry.link.counts import Counts
from kvferry.link.fair_share import has_share
from kvferry.link.query_commands import SETTLING, Producer, QueryCommand, StartQuery
from kvferry.protocol.errors import HandshakeFailed, KvferryError
from kvferry.protocol.handshake import encode
from kvferry.protocol.hosts import host_port, one_spelling
from kvferry.protocol.prompt_queries import (
    MAX_ANSWERS_BYTES,
    MAX_QUERIES,
    Answer,
    PromptProgress,
    PromptQuery,
    Subscribe,
    Unsubscribe,
    decode_answers,
)
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


OnAnswer = Callable[[Producer, Answer], None]

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _QueriedProducer:
    """A producer with open queries, or with a connection that is kept for the next.

    Attributes:
        needed_for: the queries whose requests name it, or of which it knows the prompt. Without any it is a sibling
            that may be given up.
        is_sibling: other producers have named it, and it was never needed.
        changed: set when there is something to send.
    """

    producer: Producer
    queries: dict[int, PromptQuery] = field(default_factory=dict)
    needed_for: set[int] = field(default_factory=set)
    is_sibling: bool = False
    unsent: list[PromptQuery] = field(default_factory=list)
    unsubscribed: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    slot: ConnectionSlot | None = None
    task: asyncio.Task[None] = field(init=False)


@dataclass(slots=True, eq=False)
class _OpenQuery:
    """An open query, and what producers have answered to it.

    Attributes:
        named: the producer that its request names.
        sent_to: the producers that are queried.
        known_by: those that have the prompt in their queue.
        reported: the one of these that was passed on.
        has_answer: whether any answer was passed on.
        siblings_queried_s: when siblings were queried last.
    """

    query: PromptQuery
    named: Producer
    sent_to: set[Producer] = field(default_factory=set)
    known_by: dict[Producer, None] = field(default_factory=dict)
    reported: Producer | None = None
    has_answer: bool = False
    siblings_queried_s: float | None = None


@dataclass(frozen=True, slots=True)
class QueryClientSnapshot:
    """Attributes:
    open: numbers of the open queries.
    answered: those of them with an answer that was passed on.
    producers: numbers of the queries of each producer.
    siblings: producers that are queried only because others have named them.
    is_sending: whether a producer has to be told that a query is over.
    connections: connections that are used or kept.
    """

    open: frozenset[int]
    answered: frozenset[int]
    producers: Mapping[Producer, frozenset[int]]
    siblings: frozenset[Producer]
    is_sending: bool
    connections: int


class QueryClient:
    """Queries producers until the client is closed.

    Args:
        client_id: the announced id of this engine.
        counters: counts `side_channel_errors`.
        on_answer: called on the client's thread with every answer that settles a query, and with those that change
            whether a producer knows its prompt. A producer that cannot be reached knows none of its prompts.
        proven: see `ConnectionSlots`.
    """

    def __init__(
        self,
        client: SideChannelClient,
        client_id: str,
        counters: Counts,
        on_answer: OnAnswer,
        proven: ProvenAddresses | None = None,
    ) -> None:
        self._client = client
        self._client_id = client_id
        self._counters = counters
        self._on_answer = on_answer
        self._slots = ConnectionSlots(limits.SLOTS, proven)
        self._open: dict[int, _OpenQuery] = {}
        self._by_producer: dict[Producer, _QueriedProducer] = {}
        self._siblings_by_host: Counter[str] = Counter()
        self._log = RateLimitedLog(logger, 1.0)

    def submit(self, commands: Iterable[QueryCommand]) -> None:
        """Hand over commands; returns at once."""
        submitted = tuple(commands)
        if submitted:
            self._client.call_soon(lambda: self._carry_out(submitted))

    # On the client's loop, as everything below.

    def snapshot(self) -> QueryClientSnapshot:
        """Which producers are queried now. May be called on another thread while the client's waits."""
        opened = dict(self._open)
        producers = dict(self._by_producer)
        return QueryClientSnapshot(
            open=frozenset(opened),
            answered=frozenset(number for number, query in opened.items() if query.has_answer),
            producers={name: frozenset(one.queries) for name, one in producers.items()},
            siblings=frozenset(name for name, one in producers.items() if one.is_sibling),
            is_sending=any(one.unsubscribed for one in producers.values()),
            connections=len(self._slots),
        )

    def _carry_out(self, commands: tuple[QueryCommand, ...]) -> None:
        for command in commands:
            if isinstance(command, StartQuery):
                number = command.query.number
                opened = self._open.setdefault(number, _OpenQuery(command.query, command.producer))
                queried = self._start(opened, command.producer)
                self._need(queried, number)
            else:
                self._stop(command.number)

    def _start(
        self, opened: _OpenQuery, producer: Producer, *, is_sibling: bool = False
    ) -> _QueriedProducer:
        queried = self._by_producer.get(producer)
        if queried is None:
            queried = _QueriedProducer(producer, is_sibling=is_sibling)
            self._by_producer[producer] = queried
            if is_sibling:
                self._siblings_by_host[one_spelling(producer[0])] += 1
            queried.task = asyncio.ensure_future(self._serve(queried))
        number = opened.query.number
        if number not in queried.queries:
            opened.sent_to.add(producer)
            queried.queries[number] = opened.query
            queried.unsent.append(opened.query)
            queried.changed.set()
        return queried

    def _start_siblings(self, opened: _OpenQuery, host: str, ports: Iterable[int]) -> None:
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
        return has_share(num_of_host, self._siblings_by_host.total(), limits.MAX_SIBLINGS)

    def _need(self, queried: _QueriedProducer, number: int) -> None:
        """The producer is needed for this query."""
        queried.needed_for.add(number)
        if queried.is_sibling:
            self._end_sibling(queried)
            if queried.slot is None:
                # It may wait behind many other siblings. As a needed producer it has another turn.
                queried.task.cancel()
                queried.task = asyncio.ensure_future(self._serve(queried))
        self._update_slot(queried)

    def _stop(self, number: int) -> None:
        opened = self._open.pop(number, None)
        if opened is None:
            return
        for producer in opened.sent_to:
            queried = self._by_producer[producer]
            del queried.queries[number]
            queried.needed_for.discard(number)
            if queried.slot is None and not queried.queries:
                # Not connected yet: a query that is over must not keep its turn from others. 300 aborted requests that
                # named closed ports kept all connections from honest prompts for 10 s.
                self._forget(queried)
                queried.task.cancel()
            else:
                queried.unsubscribed.append(number)
                queried.changed.set()
                self._update_slot(queried)

    def _update_slot(self, queried: _QueriedProducer) -> None:
        if queried.slot is None:
            return
        if queried.needed_for:
            queried.slot.use()
        else:
            queried.slot.idle()

    def _end_sibling(self, queried: _QueriedProducer) -> None:
        queried.is_sibling = False
        host = one_spelling(queried.producer[0])
        self._siblings_by_host[host] -= 1
        if not self._siblings_by_host[host]:
            del self._siblings_by_host[host]

    def _give_up(self, queried: _QueriedProducer) -> None:
        """Its slot is needed. It has no open queries, or is a sibling that knows none of the prompts."""
        self._forget(queried)
        queried.task.cancel()

    def _forget(self, queried: _QueriedProducer) -> None:
        if self._by_producer.get(queried.producer) is not queried:
            return
        del self._by_producer[queried.producer]
        if queried.is_sibling:
            self._end_sibling(queried)
        for number in queried.queries:
            opened = self._open[number]
            opened.sent_to.discard(queried.producer)
            opened.known_by.pop(queried.producer, None)

    async def _serve(self, queried: _QueriedProducer) -> None:
        """Query a producer until no query was open for `IDLE_S`."""
        failures = 0
        try:
            while queried.queries and self._is_served_here(queried):
                try:
                    await self._connect_and_converse(queried)
                except KvferryError as failed:
                    why = str(failed)
                except Exception:
                    why = "an internal error"
                    logger.exception("%s could not be queried", host_port(*queried.producer))
                else:
                    # Not the end: a query may have come while the last message was sent.
                    failures = 0
                    continue
                failures += 1
                self._log_failure(queried.producer, why)
                for number in list(queried.queries):
                    unknown = Answer(number=number, progress=PromptProgress.UNKNOWN)
                    self._answered(queried, unknown)
                await asyncio.sleep(limits.RETRY.delay_s(failures))
        finally:
            if self._is_served_here(queried):
                self._forget(queried)

    def _is_served_here(self, queried: _QueriedProducer) -> bool:
        """False in a task that another one has replaced (`_need`)."""
        return queried.task is asyncio.current_task()

    async def _connect_and_converse(self, queried: _QueriedProducer) -> None:
        host, port = queried.producer

        def connect() -> Coroutine[Any, Any, Connection]:
            connecting = self._client.connect(host, port, MAX_ANSWERS_BYTES)
            return within(limits.CONNECT_S, connecting)

        slot = await self._slots.connect(
            queried.producer,
            connect,
            lambda: self._give_up(queried),
            Kind.SIBLING if queried.is_sibling else Kind.NAMED,
        )
        try:
            if not self._is_served_here(queried):
                return
            queried.slot = slot
            queried.unsent = list(queried.queries.values())
            await self._converse(queried, slot.connection)
        finally:
            slot.close(linger_ms=limits.LINGER_MS)
            if self._is_served_here(queried):
                queried.slot = None

    async def _converse(self, queried: _QueriedProducer, connection: Connection) -> None:
        """Send queries and pass on answers, until no query was open for `IDLE_S` or an idle connection ends.

        Raises:
            KvferryError: a connection with open queries has ended, or the producer has answered nothing from one
                repetition to the next.
        """
        clock = asyncio.get_running_loop().time
        received = asyncio.ensure_future(connection.receive())
        repeat_s = clock() + limits.REPEAT_S
        has_answered = False
        try:
            while True:
                self._update_slot(queried)
                await self._send(queried, connection)
                is_idle = not queried.queries
                timeout_s = limits.IDLE_S if is_idle else max(0.0, repeat_s - clock())
                has_news = await _wait_for_news(received, queried.changed, timeout_s)
                if is_idle and (not has_news or _has_failed(received)):
                    return
                if received.done():
                    self._take(queried, received.result())
                    received = asyncio.ensure_future(connection.receive())
                    has_answered = True
                if not is_idle:
                    if clock() < repeat_s:
                        continue
                    if not has_answered:
                        # Its host may be gone, which TCP notices much later.
                        raise HandshakeFailed(f"has not answered for {limits.REPEAT_S:g} s")
                    queried.unsent = list(queried.queries.values())
                repeat_s = clock() + limits.REPEAT_S
                has_answered = False
        finally:
            received.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvferryError):
                await received

    async def _send(self, queried: _QueriedProducer, connection: Connection) -> None:
        queried.changed.clear()
        # Taken before the first wait: what comes meanwhile is for the next call.
        unsent = [query for query in queried.unsent if query.number in queried.queries]
        queried.unsent = []
        unsubscribed = queried.unsubscribed
        queried.unsubscribed = []
        for queries in _messages(unsent):
            await connection.send(encode(Subscribe(client_id=self._client_id, queries=queries)))
        for numbers in _messages(unsubscribed):
            await connection.send(encode(Unsubscribe(client_id=self._client_id, numbers=numbers)))

    def _take(self, queried: _QueriedProducer, frame: bytes) -> None:
        answers = decode_answers(frame)
        host, own_port = queried.producer
        siblings = [port for port in answers.siblings if port != own_port]
        for answer in answers.answers:
            if answer.number not in queried.queries:
                continue  # settled, or none of this producer's
            self._answered(queried, answer)
            opened = self._open[answer.number]
            is_named = opened.named == queried.producer
            if is_named and answer.progress is PromptProgress.UNKNOWN:
                self._start_siblings(opened, host, siblings)

    def _answered(self, queried: _QueriedProducer, answer: Answer) -> None:
        """Pass on an answer that changes something."""
        # Only such: a producer that repeats its answers must cost the engine nothing.
        opened = self._open[answer.number]
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

    def _lost(self, queried: _QueriedProducer, opened: _OpenQuery, answer: Answer) -> None:
        """The producer that was passed on does not know the prompt any more."""
        producer = queried.producer
        del opened.known_by[producer]
        opened.reported = None
        if producer != opened.named:
            queried.needed_for.discard(answer.number)
            self._update_slot(queried)
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

    def _log_failure(self, producer: Producer, why: str) -> None:
        self._counters.add("side_channel_errors")
        self._log.warning("querying %s: %s", host_port(*producer), why)


async def _wait_for_news(
    received: asyncio.Future[bytes], changed: asyncio.Event, timeout_s: float
) -> bool:
    """Wait for a message or a change. False if neither came in time."""
    change = asyncio.ensure_future(changed.wait())
    try:
        done, _ = await asyncio.wait(
            (received, change), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        change.cancel()
    return bool(done)


def _has_failed(received: asyncio.Future[bytes]) -> bool:
    return received.done() and received.exception() is not None


def _messages(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """The items, as many at a time as fit into a message."""
    for start in range(0, len(items), MAX_QUERIES):
        yield tuple(items[start : start + MAX_QUERIES])
