"""Asks producers about prompts that they prefill at this moment, on the thread of the side channel's client.

Each producer has a task with a connection, kept for `IDLE_S` after its last open question: the next one must not wait
for a handshake. Open questions are repeated every `REPEAT_S` and over every new connection, so no answer depends on a
single message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.protocol.asks import (
    MAX_ANSWERS_BYTES,
    MAX_QUESTIONS,
    Answer,
    Ask,
    Progress,
    Question,
    Unask,
    decode_answers,
)
from kvferry.protocol.errors import HandshakeFailed, KvferryError
from kvferry.protocol.handshake import encode
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.connection import Connection, backoff_s, within
from kvferry.protocol.side_channel.hosts import host_port
from kvferry.scheduler.consumer.questions import AskCommand, Producer, StartAsking
from kvferry.scheduler.state import Counters

logger = logging.getLogger(__name__)

REPEAT_S = 5.0
CONNECT_S = 5.0
IDLE_S = 60.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 2.0
MAX_PRODUCERS = 256
"""Most producers with a connection; beyond it one without an open question is closed. Clients choose hosts."""

OnAnswer = Callable[[Producer, Answer], None]


@dataclass(slots=True, eq=False)
class _Asked:
    """A producer with open questions, or with a connection that is kept for the next."""

    producer: Producer
    questions: dict[int, Question] = field(default_factory=dict)
    unsent: list[Question] = field(default_factory=list)
    unasked: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] = field(init=False)


class Asker:
    """Asks until the client is closed.

    Args:
        asker: the announced id of this engine.
        counters: counts `side_channel_errors`.
        on_answer: called on the client's thread with every answer; a producer that cannot be reached does not know any
            of its prompts.
    """

    def __init__(self, client: SideChannelClient, asker: str, counters: Counters, on_answer: OnAnswer) -> None:
        self._client = client
        self._asker = asker
        self._counters = counters
        self._on_answer = on_answer
        self._by_producer: dict[Producer, _Asked] = {}
        self._log = RateLimitedLog(logger, 1.0)

    def submit(self, commands: Iterable[AskCommand]) -> None:
        """Hand over commands; returns at once."""
        taken = tuple(commands)
        if taken:
            self._client.call_soon(lambda: self._carry_out(taken))

    def _carry_out(self, commands: tuple[AskCommand, ...]) -> None:
        for command in commands:
            if isinstance(command, StartAsking):
                self._start(command.producer, command.question)
            else:
                self._stop(command.number)

    def _start(self, producer: Producer, question: Question) -> None:
        asked = self._by_producer.get(producer)
        if asked is None:
            if len(self._by_producer) >= MAX_PRODUCERS and not self._close_idle():
                self._failed(producer, "too many producers are asked at once")
                return
            asked = self._by_producer[producer] = _Asked(producer)
            asked.task = asyncio.ensure_future(self._ask(asked))
        if question.number not in asked.questions:
            asked.questions[question.number] = question
            asked.unsent.append(question)
            asked.news.set()

    def _stop(self, number: int) -> None:
        for asked in self._by_producer.values():
            if asked.questions.pop(number, None) is not None:
                asked.unasked.append(number)
                asked.news.set()

    def _close_idle(self) -> bool:
        """Close the connection of one producer without an open question. False if there is none."""
        idle = next((asked for asked in self._by_producer.values() if not asked.questions), None)
        if idle is None:
            return False
        del self._by_producer[idle.producer]
        idle.task.cancel()
        return True

    async def _ask(self, asked: _Asked) -> None:
        """Ask a producer until no question was open for `IDLE_S`."""
        failures = 0
        try:
            while asked.questions:
                connection: Connection | None = None
                try:
                    host, port = asked.producer
                    connection = await within(CONNECT_S, self._client.connect(host, port, MAX_ANSWERS_BYTES))
                    asked.unsent = list(asked.questions.values())
                    await self._converse(asked, connection)
                    failures = 0
                except KvferryError as failed:
                    why = str(failed)
                except Exception:
                    why = "an internal error"
                    logger.exception("%s could not be asked", host_port(*asked.producer))
                else:
                    continue  # a question may have come while the last message was sent
                finally:
                    if connection is not None:
                        connection.close(linger_ms=100)
                failures += 1
                self._failed(asked.producer, why)
                for number in list(asked.questions):
                    self._on_answer(asked.producer, Answer(number=number, progress=Progress.UNKNOWN))
                await asyncio.sleep(backoff_s(failures, FIRST_BACKOFF_S, MAX_BACKOFF_S))
        finally:
            if self._by_producer.get(asked.producer) is asked:
                del self._by_producer[asked.producer]

    async def _converse(self, asked: _Asked, connection: Connection) -> None:
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
                await self._send(asked, connection)
                is_idle = not asked.questions
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
                    asked.unsent = list(asked.questions.values())
        finally:
            received.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvferryError):
                await received

    async def _send(self, asked: _Asked, connection: Connection) -> None:
        asked.news.clear()
        unsent, asked.unsent = [x for x in asked.unsent if x.number in asked.questions], []
        unasked, asked.unasked = asked.unasked, []
        for at in range(0, len(unsent), MAX_QUESTIONS):
            await connection.send(encode(Ask(asker=self._asker, questions=tuple(unsent[at : at + MAX_QUESTIONS]))))
        for at in range(0, len(unasked), MAX_QUESTIONS):
            await connection.send(encode(Unask(asker=self._asker, numbers=tuple(unasked[at : at + MAX_QUESTIONS]))))

    def _take(self, asked: _Asked, frame: bytes) -> None:
        answers = decode_answers(frame)
        host, own_port = asked.producer
        for answer in answers.answers:
            question = asked.questions.get(answer.number)
            if question is None:
                continue  # settled, or none of this producer's
            self._on_answer(asked.producer, answer)
            if answer.progress is Progress.UNKNOWN:
                for port in answers.siblings:
                    if port != own_port:
                        self._start((host, port), question)

    def _failed(self, producer: Producer, why: str) -> None:
        self._counters.add("side_channel_errors")
        self._log.warning("asking %s: %s", host_port(*producer), why)
