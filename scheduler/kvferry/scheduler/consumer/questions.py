"""Questions of this engine about prompts that are prefilled at this moment, until each has a ticket or is given up.

No I/O, no clock. Commands for the side channel are returned in order: `StartAsking`, `StopAsking`.

A request that ends before its question is settled leaves the question open for a while: the producer may still prefill
the prompt, and its blocks would be held, unread, until their lease runs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.protocol.asks import Progress, Question

UNKNOWN_S = 10.0
"""How long a producer may not know of a prompt: its leg may still be on the way, or is lost."""
MAX_OPEN = 1 << 14
"""Most open questions; the prompts of further requests are computed here."""

SETTLING = (Progress.TICKET, Progress.OVER)
"""Answers that settle a question."""

Producer = tuple[str, int]
"""Host and port of a side channel."""


@dataclass(frozen=True, slots=True)
class StartAsking:
    """Ask this producer, again and again until `StopAsking`."""

    producer: Producer
    question: Question


@dataclass(frozen=True, slots=True)
class StopAsking:
    """The question is settled."""

    number: int


AskCommand = StartAsking | StopAsking


@dataclass(slots=True)
class OpenQuestion:
    """One question.

    Attributes:
        waits: whether its request waits for the answer; False when it has ended.
        known_by: the producers that have the prompt in their queue: one, or none.
        unknown_since_s: when `known_by` became empty.
    """

    request_id: str
    question: Question
    unknown_since_s: float
    waits: bool = True
    known_by: set[Producer] = field(default_factory=set)


class Questions:
    """All open questions of one engine. `now_s` is from any monotonic clock.

    Args:
        spans: of this engine's blocks, if it reads prompts while they are computed (`Question`).
    """

    def __init__(self, spans: tuple[int, ...] = ()) -> None:
        self._spans = spans
        self._next = 0
        self._by_number: dict[int, OpenQuestion] = {}
        self._by_request: dict[str, OpenQuestion] = {}
        self._commands: list[AskCommand] = []

    def __len__(self) -> int:
        """The number of requests that wait for an answer."""
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        """Whether this request waits for an answer."""
        return request_id in self._by_request

    def ask(self, request_id: str, producer: Producer, key: str, num_tokens: int, digest: str, now_s: float) -> bool:
        """A request has arrived whose prompt this producer prefills. False if too many questions are open."""
        if len(self._by_number) >= MAX_OPEN:
            return False
        question = Question(number=self._next, key=key, num_tokens=num_tokens, digest=digest, spans=self._spans)
        self._next += 1
        opened = OpenQuestion(request_id, question, now_s)
        self.finished(request_id)  # an earlier request of this id
        self._by_number[question.number] = self._by_request[request_id] = opened
        self._commands.append(StartAsking(producer, question))
        return True

    def answered(self, producer: Producer, number: int, progress: Progress, now_s: float) -> OpenQuestion | None:
        """A producer has answered, or is not reachable (`UNKNOWN`).

        Returns:
            The question, if this settles it: with a ticket, or because the prompt is over. None if it stays open, or
            was settled before.
        """
        opened = self._by_number.get(number)
        if opened is None:
            return None
        if progress in SETTLING:
            self._settle(opened)
            return opened
        if progress is Progress.QUEUED:
            opened.known_by.add(producer)
        elif producer in opened.known_by:
            opened.known_by.discard(producer)
            opened.unknown_since_s = now_s
        return None

    def give_up(self, now_s: float) -> Iterator[OpenQuestion]:
        """Settle the questions about prompts that no producer has known for `UNKNOWN_S`."""
        for opened in list(self._by_number.values()):
            if not opened.known_by and now_s >= opened.unknown_since_s + UNKNOWN_S:
                self._settle(opened)
                yield opened

    def next_s(self) -> float | None:
        """When `give_up` has something to do next, at the earliest; None if nothing is open."""
        times_s = [x.unknown_since_s + UNKNOWN_S for x in self._by_number.values() if not x.known_by]
        return min(times_s, default=None)

    def finished(self, request_id: str) -> None:
        """The request has ended without an answer. Its question stays open, so that a ticket can be given back."""
        opened = self._by_request.pop(request_id, None)
        if opened is not None:
            opened.waits = False

    def take_commands(self) -> tuple[AskCommand, ...]:
        """Commands for the side channel since the last call, in order."""
        commands, self._commands = self._commands, []
        return tuple(commands)

    def _settle(self, opened: OpenQuestion) -> None:
        del self._by_number[opened.question.number]
        if opened.waits:  # otherwise a later request may have its id
            self._by_request.pop(opened.request_id, None)
        self._commands.append(StopAsking(opened.question.number))
