"""Asks producers about prompts that they prefill at this moment, on the thread of the side channel's client.

Each producer has a task with a connection, kept for `IDLE_S` after its last open question: the next one must not wait
for a handshake. Open questions are repeated every `REPEAT_S` and over every new connection, so no answer depends on a
single message.

A producer that does not know a prompt names the other data-parallel ranks of its engine, its *siblings*, which are
asked too. Requests name producers, and producers name siblings, so both can be any ports. A producer that a request
names has a place in use (`places.py`) as long as the question is open. A sibling has not, unless it knows the prompt:
its connection is closed as soon as its place is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from kvferry.protocol.errors import HandshakeFailed, KvferryError
from kvferry.protocol.handshake import encode
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
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.connection import Connection, backoff_s, within
from kvferry.protocol.side_channel.hosts import host_port, one_spelling
from kvferry.scheduler.consumer.pending_queries import SETTLING
from kvferry.scheduler.consumer.pending_query import Producer, QueryCommand, StartQuery
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.fair_share import has_share
from kvferry.scheduler.side_channel.connection_slots import (
    ConnectionSlot,
    ConnectionSlots,
    Kind,
    ProvenAddresses,
)

logger = logging.getLogger(__name__)

REPEAT_S = 5.0
CONNECT_S = 5.0
IDLE_S = 60.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 2.0
MAX_PRODUCERS = 256
"""Most producers with a connection; beyond it one without an open question is closed. Clients choose hosts."""
MOST_SIBLINGS = 64
"""Of one producer; an engine has no more ranks on a host. Further ones are not asked."""
MOST_OFFERED = 256
"""Most producers that are asked only because others have named them."""

OnAnswer = Callable[[Producer, Answer], None]


@dataclass(slots=True, eq=False)
class _QueriedProducer:
    """A producer with open questions, or with a connection that is kept for the next.

    Attributes:
        needed_for: the questions whose requests name it, or of which it knows the prompt. Without any it is a sibling
            that may be given up.
        is_offered: it was never needed.
    """

    producer: Producer
    queries: dict[int, PromptQuery] = field(default_factory=dict)
    needed_for: set[int] = field(default_factory=set)
    is_offered: bool = False
    unsent: list[PromptQuery] = field(default_factory=list)
    unasked: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    place: ConnectionSlot | None = None
    task: asyncio.Task[None] = field(init=False)


@dataclass(slots=True, eq=False)
class _Open:
    """An open question, and what its producers have answered.

    Attributes:
        named: the producer that its request names.
        asked_of: those that are asked.
        known_by: those that have the prompt in their queue.
        reported: the one of them that was passed on.
        has_answer: whether any answer was passed on.
        siblings_s: when siblings were asked last.
    """

    query: PromptQuery
    named: Producer
    asked_of: set[Producer] = field(default_factory=set)
    known_by: dict[Producer, None] = field(default_factory=dict)
    reported: Producer | None = None
    has_answer: bool = False
    siblings_s: float | None = None


class QueryClient:
    """Asks until the client is closed.

    Args:
        client_id: the announced id of this engine.
        counters: counts `side_channel_errors`.
        on_answer: called on the client's thread with every answer that settles a question, and with those that change
            whether a producer knows its prompt; one that cannot be reached does not know any of its prompts. A producer
            that repeats its answers costs the engine nothing.
        proven: see `ConnectionSlots`.
    """

    def __init__(
        self,
        client: SideChannelClient,
        client_id: str,
        counters: Counters,
        on_answer: OnAnswer,
        proven: ProvenAddresses | None = None,
    ) -> None:
        self._client = client
        self._asker = client_id
        self._counters = counters
        self._on_answer = on_answer
        self._places = ConnectionSlots(MAX_PRODUCERS, proven)
        self._open: dict[int, _Open] = {}
        self._by_producer: dict[Producer, _QueriedProducer] = {}
        self._offered: Counter[str] = Counter()  # by host
        self._log = RateLimitedLog(logger, 1.0)

    def submit(self, commands: Iterable[QueryCommand]) -> None:
        """Hand over commands; returns at once."""
        taken = tuple(commands)
        if taken:
            self._client.call_soon(lambda: self._carry_out(taken))

    def _carry_out(self, commands: tuple[QueryCommand, ...]) -> None:
        for command in commands:
            if isinstance(command, StartQuery):
                number = command.query.number
                opened = self._open.setdefault(number, _Open(command.query, command.producer))
                self._need(self._start(opened, command.producer), number)
            else:
                self._stop(command.number)

    def _start(
        self, opened: _Open, producer: Producer, *, is_offered: bool = False
    ) -> _QueriedProducer:
        asked = self._by_producer.get(producer)
        if asked is None:
            asked = self._by_producer[producer] = _QueriedProducer(producer, is_offered=is_offered)
            if is_offered:
                self._offered[one_spelling(producer[0])] += 1
            asked.task = asyncio.ensure_future(self._ask(asked))
        number = opened.query.number
        if number not in asked.queries:
            opened.asked_of.add(producer)
            asked.queries[number] = opened.query
            asked.unsent.append(opened.query)
            asked.news.set()
        return asked

    def _start_siblings(self, opened: _Open, host: str, ports: Iterable[int]) -> None:
        now_s = asyncio.get_running_loop().time()
        if opened.siblings_s is not None and now_s < opened.siblings_s + REPEAT_S:
            return
        opened.siblings_s = now_s
        for port in islice(ports, MOST_SIBLINGS):
            is_asked = (host, port) in self._by_producer
            if is_asked or has_share(
                self._offered[one_spelling(host)], self._offered.total(), MOST_OFFERED
            ):
                self._start(opened, (host, port), is_offered=True)

    def _need(self, asked: _QueriedProducer, number: int) -> None:
        """The producer is needed for this question."""
        asked.needed_for.add(number)
        if asked.is_offered:
            self._end_offer(asked)
            if asked.place is None:  # it may wait behind many other siblings
                asked.task.cancel()
                asked.task = asyncio.ensure_future(self._ask(asked))
        self._update_place(asked)

    def _stop(self, number: int) -> None:
        opened = self._open.pop(number, None)
        for producer in opened.asked_of if opened is not None else ():
            asked = self._by_producer[producer]
            del asked.queries[number]
            asked.needed_for.discard(number)
            if (
                asked.place is None and not asked.queries
            ):  # a question that is over takes up nobody's turn
                self._forget(asked)
                asked.task.cancel()
            else:
                asked.unasked.append(number)
                asked.news.set()
                self._update_place(asked)

    def _update_place(self, asked: _QueriedProducer) -> None:
        if asked.place is not None and asked.needed_for:
            asked.place.use()
        elif asked.place is not None:
            asked.place.idle()

    def _end_offer(self, asked: _QueriedProducer) -> None:
        asked.is_offered = False
        host = one_spelling(asked.producer[0])
        self._offered[host] -= 1
        if not self._offered[host]:
            del self._offered[host]

    def _give_up(self, asked: _QueriedProducer) -> None:
        """Its place is needed. It has no open questions, or is a sibling that knows nothing."""
        self._forget(asked)
        asked.task.cancel()

    def _forget(self, asked: _QueriedProducer) -> None:
        if self._by_producer.get(asked.producer) is not asked:
            return
        del self._by_producer[asked.producer]
        if asked.is_offered:
            self._end_offer(asked)
        for number in asked.queries:
            self._open[number].asked_of.discard(asked.producer)
            self._open[number].known_by.pop(asked.producer, None)

    async def _ask(self, asked: _QueriedProducer) -> None:
        """Ask a producer until no question was open for `IDLE_S`."""
        failures = 0
        host, port = asked.producer
        try:
            while asked.queries:
                place: ConnectionSlot | None = None
                try:
                    place = await self._places.connect(
                        asked.producer,
                        lambda: within(
                            CONNECT_S, self._client.connect(host, port, MAX_ANSWERS_BYTES)
                        ),
                        lambda: self._give_up(asked),
                        Kind.OFFERED if asked.is_offered else Kind.NAMED,
                    )
                    if asked.task is not asyncio.current_task():
                        return
                    asked.place = place
                    asked.unsent = list(asked.queries.values())
                    await self._converse(asked, place.connection)
                    failures = 0
                except KvferryError as failed:
                    why = str(failed)
                except Exception:
                    why = "an internal error"
                    logger.exception("%s could not be asked", host_port(*asked.producer))
                else:
                    continue  # a question may have come while the last message was sent
                finally:
                    if place is not None:
                        place.close(linger_ms=100)
                    if asked.task is asyncio.current_task():
                        asked.place = None
                failures += 1
                self._failed(asked.producer, why)
                for number in list(asked.queries):
                    self._answered(asked, Answer(number=number, progress=PromptProgress.UNKNOWN))
                await asyncio.sleep(backoff_s(failures, FIRST_BACKOFF_S, MAX_BACKOFF_S))
        finally:
            if asked.task is asyncio.current_task():  # otherwise another has taken over
                self._forget(asked)

    async def _converse(self, asked: _QueriedProducer, connection: Connection) -> None:
        """Send questions and pass on answers, until no question was open for `IDLE_S` or an idle connection ends.

        Raises:
            KvferryError: a connection with open questions has ended, or the producer has answered nothing from one
                repetition to the next: its host may be gone.
        """
        received = asyncio.ensure_future(connection.receive())
        clock = asyncio.get_running_loop().time
        repeat_s, has_answered = clock() + REPEAT_S, False
        try:
            while True:
                self._update_place(asked)
                await self._send(asked, connection)
                is_idle = not asked.queries
                news = asyncio.ensure_future(asked.news.wait())
                try:
                    timeout_s = IDLE_S if is_idle else max(0.0, repeat_s - clock())
                    done, _ = await asyncio.wait(
                        (received, news), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    news.cancel()
                if is_idle and (not done or (received.done() and received.exception() is not None)):
                    return
                if received.done():
                    self._take(asked, received.result())
                    received, has_answered = asyncio.ensure_future(connection.receive()), True
                if is_idle:
                    repeat_s, has_answered = clock() + REPEAT_S, False
                elif clock() >= repeat_s:
                    if not has_answered:
                        raise HandshakeFailed(f"has not answered for {REPEAT_S:g} s")
                    repeat_s, has_answered = clock() + REPEAT_S, False
                    asked.unsent = list(asked.queries.values())
        finally:
            received.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvferryError):
                await received

    async def _send(self, asked: _QueriedProducer, connection: Connection) -> None:
        asked.news.clear()
        unsent, asked.unsent = [x for x in asked.unsent if x.number in asked.queries], []
        unasked, asked.unasked = asked.unasked, []
        for at in range(0, len(unsent), MAX_QUERIES):
            await connection.send(
                encode(
                    Subscribe(client_id=self._asker, queries=tuple(unsent[at : at + MAX_QUERIES]))
                )
            )
        for at in range(0, len(unasked), MAX_QUERIES):
            await connection.send(
                encode(
                    Unsubscribe(
                        client_id=self._asker, numbers=tuple(unasked[at : at + MAX_QUERIES])
                    )
                )
            )

    def _take(self, asked: _QueriedProducer, frame: bytes) -> None:
        answers = decode_answers(frame)
        host, own_port = asked.producer
        siblings = [port for port in answers.siblings if port != own_port]
        for answer in answers.answers:
            if answer.number not in asked.queries:
                continue  # settled, or none of this producer's
            self._answered(asked, answer)
            opened = self._open[answer.number]
            if answer.progress is PromptProgress.UNKNOWN and opened.named == asked.producer:
                self._start_siblings(opened, host, siblings)

    def _answered(self, asked: _QueriedProducer, answer: Answer) -> None:
        """Pass on an answer that changes something. With siblings a prompt is known as long as one of them knows it."""
        opened = self._open[answer.number]
        producer = asked.producer
        is_first = not opened.has_answer
        opened.has_answer = True
        if answer.progress in SETTLING:
            self._on_answer(producer, answer)
        elif answer.progress is PromptProgress.QUEUED:
            opened.known_by[producer] = None
            if opened.reported is None:
                self._report(opened, producer)
        elif opened.reported == producer:
            del opened.known_by[producer]
            opened.reported = None
            if producer != opened.named:
                asked.needed_for.discard(answer.number)
                self._update_place(asked)
            other = next(iter(opened.known_by), None)
            if other is not None:
                self._report(opened, other)
            else:
                self._on_answer(producer, answer)
        else:
            opened.known_by.pop(producer, None)
            if is_first or answer.reason:
                self._on_answer(producer, answer)

    def _report(self, opened: _Open, producer: Producer) -> None:
        """Pass on that this producer has the prompt in its queue. It is needed from now on."""
        opened.reported = producer
        number = opened.query.number
        self._need(self._by_producer[producer], number)
        self._on_answer(producer, Answer(number=number, progress=PromptProgress.QUEUED))

    def _failed(self, producer: Producer, why: str) -> None:
        self._counters.add("side_channel_errors")
        self._log.warning("asking %s: %s", host_port(*producer), why)
