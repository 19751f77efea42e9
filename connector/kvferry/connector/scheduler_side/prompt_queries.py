"""Requests whose prompts are prefilled on another engine at this moment: they wait for the answers to their questions.

vLLM asks a connector again in every step how many tokens it can load for a waiting request, as long as the answer is
that it is not known yet, except for parked ones (`parking.py`). When all requests of an engine wait for answers, its
loop waits too (`steps.py`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvferry.connector.scheduler_side.parking import Parking
from kvferry.connector.vllm.loop import EngineLoop
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.params import NamedPrefill
from kvferry.protocol.prompt_queries import Answer, PromptProgress, request_key
from kvferry.scheduler.consumer.pending_queries import SETTLING, PendingQueries
from kvferry.scheduler.consumer.pending_query import PendingQuery, Producer

if TYPE_CHECKING:
    from vllm.v1.request import Request

MOST_AT_ONCE = 32
"""Most answers, and most questions that are given up, in one call of `take`; the others are for the next calls. Clients
choose how many questions are open, and a producer can answer all of them at any moment."""


class Settled(NamedTuple):
    """A question that is settled.

    Attributes:
        waits: whether its request waits for the answer; if not, a ticket is to be given back.
        answer: a ticket or `OVER`; None if no producer knows of the prompt, or the question was crowded out.
        digest: of the whole prompt.
        is_crowded_out, unknown_why: see `PendingQuery`.
    """

    request_id: str
    waits: bool
    answer: Answer | None
    digest: str = ""
    is_crowded_out: bool = False
    unknown_why: str = ""


class _Answers:
    """Answers that no step has taken yet. Of those to one question the latest is kept, or the one that settles it,
    however many come during a step.

    Those that settle a question are taken first: a producer that changes its mind about all others delays none.
    """

    def __init__(self) -> None:
        self._settling: OrderedDict[int, tuple[Producer, Answer]] = (
            OrderedDict()
        )  # by number of the question
        self._others: OrderedDict[int, tuple[Producer, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._settling) + len(self._others)

    def put(self, producer: Producer, answer: Answer) -> None:
        number = answer.number
        if number in self._settling:
            return
        if answer.progress in SETTLING:
            self._settling[number] = producer, answer
            self._others.pop(number, None)
            return
        earlier = self._others.get(number)
        if (
            earlier is not None
            and earlier[0] != producer
            and answer.progress is PromptProgress.UNKNOWN
        ):
            return  # the other data-parallel ranks of an engine do not know what one of them has in its queue
        self._others[number] = producer, answer

    def take_first(self, most: int) -> list[tuple[Producer, Answer]]:
        taken: list[tuple[Producer, Answer]] = []
        for answers in (self._settling, self._others):
            taken += [answers.pop(number) for number in list(islice(answers, most - len(taken)))]
        return taken


class PromptQueries:
    """The questions of one engine.

    Args:
        loop: of this engine; it is notified of answers.
        recomputes: whether vLLM computes the prompt of a failed load; otherwise the request fails.
        streams: see `PendingQueries`.

    Attributes:
        queries: open ones.
        failing: requests that fail as soon as vLLM has given them a block, because their prefill has failed.
    """

    def __init__(self, loop: EngineLoop, *, recomputes: bool, spans: tuple[int, ...] = ()) -> None:
        self.queries = PendingQueries(spans)
        self.recomputes = recomputes
        self.failing: set[str] = set()
        self._fails: list[str] = []
        self._loop = loop
        self._parking = Parking()
        self._lock = threading.Lock()
        self._answers = _Answers()

    @property
    def has_answers(self) -> bool:
        """Whether there is more to `take` at once."""
        return bool(self._answers)

    def on_answer(self, producer: Producer, answer: Answer) -> None:
        """Called on the side channel's thread."""
        with self._lock:
            is_first = not self._answers
            self._answers.put(producer, answer)
        if is_first:
            self._loop.notify()

    def ask(self, request: Request, source: NamedPrefill, prompt: Prompt) -> bool:
        """Ask for the whole prompt of a request. False if too many questions are open."""
        num_tokens = request.num_prompt_tokens
        digest = digest_chain(prompt, num_tokens)[-1]
        key = request_key(request.request_id, source.transfer_id)
        producer = (source.remote_host, source.remote_port)
        if not self.queries.ask(
            request.request_id, producer, key, num_tokens, digest, time.monotonic()
        ):
            return False
        self._parking.enter(request)
        return True

    def finished(self, request_id: str) -> None:
        """The request has ended, answered or not."""
        self.queries.finished(request_id)
        self._parking.leave(request_id)
        self.failing.discard(request_id)

    def allocated(self, request_id: str, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for a request, which fails if it is to. One that waits for no tokens from elsewhere
        is computed here: a report of it as failed would end the engine."""
        if request_id in self.failing:
            self.failing.discard(request_id)
            if num_external_tokens:
                self._fails.append(request_id)

    def begin_step(self) -> tuple[str, ...]:
        """A step begins. Returns the requests for the workers to report as failed in it."""
        fails, self._fails = self._fails, []
        return tuple(fails)

    def take(self) -> Iterator[Settled]:
        """The questions that were settled since the last call, or the first of them: a step is not to take longer the
        more are open."""
        now_s = time.monotonic()
        with self._lock:
            answers = self._answers.take_first(MOST_AT_ONCE)
        for producer, answer in answers:
            opened = self.queries.answered(
                producer, answer.number, answer.progress, now_s, answer.reason
            )
            if opened is not None:
                yield self._settled(opened, answer)
        for opened in islice(self.queries.give_up(now_s), MOST_AT_ONCE):
            yield self._settled(opened, None)

    def _settled(self, opened: PendingQuery, answer: Answer | None) -> Settled:
        if opened.waits:
            self._parking.leave(opened.request_id)
        return Settled(
            request_id=opened.request_id,
            waits=opened.waits,
            answer=answer,
            digest=opened.query.digest,
            is_crowded_out=opened.is_crowded_out,
            unknown_why=opened.unknown_why,
        )


def is_ticket(answer: Answer | None) -> bool:
    """Whether an answer contains params to read with."""
    return answer is not None and answer.progress is PromptProgress.TICKET
