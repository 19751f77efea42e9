"""Requests whose prompts are being prefilled on another engine, or may begin as one that another engine has: each
waits for answers.

    intake ─ start ─► PendingQueries ──commands──► QueryClient ══side channel══► producers
    intake ◄─take── _Answers ◄─────on_answer──── (its thread)
    prefix intake ─ search ─► PrefixSearches ──commands──► QueryClient ══side channel══► who may have the prefix
    prefix intake ◄─take_found── _found ◄──────on_found── (its thread)

vLLM asks a connector in every step how many tokens it can load for a waiting request, as long as the connector does not
know. So a waiting query costs a prefix lookup a step, unless its request is parked (`Parking`), and a step, unless
the engine's loop waits for the answers (`steps.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import NamedTuple

from kvferry.connector.scheduler_side.requests import (
    EngineRequest,
    EngineRequests,
    Parking,
)
from kvferry.connector.vllm.core import EngineLoop
from kvferry.link.commands import SETTLING, Producer, QueryCommands
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.protocol.errors import InputError
from kvferry.protocol.hosts import host_port
from kvferry.protocol.params import (
    NamedPrefill,
    RemotePrefill,
    decode_params,
    request_key,
)
from kvferry.protocol.queries import Answer, PromptProgress
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.scheduler.consumer.pending_queries import PendingQueries
from kvferry.scheduler.consumer.prefix_searches import PrefixSearches
from kvferry.scheduler.requests import PendingQuery, PrefixSearch

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 32
"""Most answers, and most queries that are given up, in one call of `take`; the others are for the next calls. Clients
choose how many queries are open, and a producer can answer all of them at any moment."""


class Settled(NamedTuple):
    """A query that is settled.

    Attributes:
        waits: whether its request waits for the answer; if not, a ticket is to be given back.
        answer: a ticket or `OVER`; None if no producer knows of the prompt, or the query was crowded out.
        is_crowded_out, unknown_why: see `PendingQuery`.
    """

    request_id: str
    waits: bool
    answer: Answer | None
    is_crowded_out: bool = False
    unknown_why: str = ""


class _Answers:
    """Answers that no step has taken yet: one for each query, however many come during a step.

    Attributes:
        settling, others: by the number of the query.
    """

    def __init__(self) -> None:
        # Those that settle a query are taken first: a producer that keeps changing its mind about thousands of others
        # delays none.
        self.settling: OrderedDict[int, tuple[Producer, Answer]] = OrderedDict()
        self.others: OrderedDict[int, tuple[Producer, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.settling) + len(self.others)

    def put(self, producer: Producer, answer: Answer) -> None:
        """An answer has come. The latest one to a query is kept, or the one that settles it."""
        number = answer.number
        if number in self.settling:
            return
        if answer.progress in SETTLING:
            self.settling[number] = (producer, answer)
            self.others.pop(number, None)
            return
        if answer.progress is PromptProgress.UNKNOWN and self._has_other_producer(
            number, producer
        ):
            # The other data-parallel ranks of an engine do not know what one of them has in its queue.
            return
        self.others[number] = (producer, answer)

    def take_first(self, most: int) -> list[tuple[Producer, Answer]]:
        """Take at most so many answers."""
        taken: list[tuple[Producer, Answer]] = []
        for answers in (self.settling, self.others):
            numbers = list(islice(answers, most - len(taken)))
            taken.extend(answers.pop(number) for number in numbers)
        return taken

    def _has_other_producer(self, number: int, producer: Producer) -> bool:
        earlier = self.others.get(number)
        return earlier is not None and earlier[0] != producer


class PromptQueries:
    """The queries of one engine.

    Args:
        requests: of this engine.
        loop: of this engine; it is notified of answers.
        recomputes: whether vLLM computes the prompt of a failed load; otherwise the request fails.
        spans: see `PendingQueries`.

    Attributes:
        queries: open ones.
        searches: for prefixes, open ones.
        commands: for the side channel, of both.
        recomputes: as given.
        unsettled: all that `take` and `take_found` look at. As long as each is empty they have nothing to do, now or
            when a time is over, and no request waits. Its members' truth may be read on any thread.
        failing: the requests for the workers to report as failed in the next step, which clears it.
        unreported: these requests, and those of earlier steps whose failure has not come back; they may have ended.
    """

    def __init__(
        self,
        requests: EngineRequests,
        loop: EngineLoop,
        *,
        recomputes: bool,
        spans: tuple[int, ...] = (),
    ) -> None:
        self.commands = QueryCommands()
        self.queries = PendingQueries(spans, requests.table, self.commands)
        self.searches = PrefixSearches(requests.table, self.commands)
        self._requests = requests
        self.recomputes = recomputes
        self.failing: list[str] = []
        self.unreported: set[str] = set()
        self._loop = loop
        self._parking = Parking()
        self._lock = threading.Lock()
        self._answers = _Answers()
        # One for each engine that a search asks, two at most.
        self._found: deque[tuple[Producer, Answer]] = deque()
        self._unusable = RateLimitedLog(logger)
        # The containers themselves, since they are looked at in every hook, and most engines have no query at most
        # times: the lock and the timers cost them 9 µs a step. An answer that comes meanwhile wakes the loop, and is
        # taken in the next step.
        self.unsettled: tuple[Sized, ...] = (
            self._found,
            self._answers.settling,
            self._answers.others,
            self.queries.open,
            self.queries.leaving,
            self.queries.crowded_out,
            self.searches.open,
            self.searches.unused,
        )

    @property
    def has_answers(self) -> bool:
        """True if there is more to `take`, or to `take_found`, at once."""
        return len(self._answers) > 0 or len(self._found) > 0

    @property
    def num_waiting(self) -> int:
        """The requests that wait for an answer."""
        return len(self.queries) + len(self.searches)

    def next_s(self) -> float | None:
        """A time before which no query and no search is given up; None if none is open."""
        times_s = (self.queries.next_s(), self.searches.next_s())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def on_answer(self, producer: Producer, answer: Answer) -> None:
        """Called on the side channel's thread."""
        with self._lock:
            is_first = not self._answers
            self._answers.put(producer, answer)
        # Later ones need no wake: the loop takes all when it takes the first. A wake each would end the loop's sleep as
        # often as producers repeat themselves.
        if is_first:
            self._loop.notify()

    def on_found(self, producer: Producer, answer: Answer) -> None:
        """Called on the side channel's thread."""
        self._found.append((producer, answer))
        # Counted after it is there, since there is no lock: the loop may take the others at any moment, and sleep.
        if len(self._found) == 1:
            self._loop.notify()

    def wait_for_search(self, entry: EngineRequest) -> None:
        """A search for the prefix of a request has begun."""
        self._parking.enter(entry)

    def start(self, entry: EngineRequest, source: NamedPrefill, prompt: Prompt) -> bool:
        """Ask for the whole prompt of a request. False if too many queries are open."""
        request = entry.request
        num_tokens = request.num_prompt_tokens
        digest = digest_chain(prompt, num_tokens)[-1]
        is_open = self.queries.start(
            request.request_id,
            (source.remote_host, source.remote_port),
            request_key(request.request_id, source.transfer_id),
            num_tokens,
            digest,
            time.monotonic(),
        )
        if is_open:
            self._parking.enter(entry)
        return is_open

    def ended(self, entry: EngineRequest) -> None:
        """The request has ended, or does not wait any more; answered or not."""
        if entry.record.query is not None:
            self.queries.finished(entry.request_id)
        if entry.record.search is not None:
            self.searches.end(entry.request_id)
        self._parking.leave(entry)

    def fail(self, entry: EngineRequest) -> None:
        """Have vLLM fail a waiting request."""
        # vLLM offers no way to do so. But it fails one whose load is reported as failed, and a load needs a block. So
        # it pretends to load one token.
        entry.must_fail = True

    def admitted(self, entry: EngineRequest, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for a request that is to fail."""
        entry.must_fail = False
        # Where vLLM loads nothing for it after all (it reads no prefix cache), it is computed here: to report a load
        # that vLLM does not know of would end the engine.
        if num_external_tokens:
            self.failing.append(entry.request_id)
            self.unreported.add(entry.request_id)

    def take(self) -> Iterator[Settled]:
        """Take the queries that were settled since the last call, at most `MOST_AT_ONCE` of each kind."""
        now_s = time.monotonic()
        with self._lock:
            answers = self._answers.take_first(MOST_AT_ONCE)
        for producer, answer in answers:
            query = self.queries.answered(
                producer, answer.number, answer.progress, now_s, answer.reason
            )
            if query is not None:
                yield self._settled(query, answer)
        for query in islice(self.queries.give_up(now_s), MOST_AT_ONCE):
            yield self._settled(query, None)

    def take_found(self, wait_s: Callable[[int], float]) -> Iterator[PrefixSearch]:
        """Take the searches that were settled since the last call, at most `MOST_AT_ONCE` of each kind.

        Args:
            wait_s: how long a request may wait for so many tokens more.
        """
        searches = self.searches
        now_s = time.monotonic()
        for _ in range(min(len(self._found), MOST_AT_ONCE)):
            producer, answer = self._found.popleft()
            reason = answer.reason
            ticket: RemotePrefill | None = None
            if is_ticket(answer):
                try:
                    # Bounded by the prompt: on this thread an answer must not take long, whoever sends it.
                    most_tokens = searches.most_tokens(answer.number)
                    ticket = decode_params(answer.params, most_tokens)
                except InputError as invalid:
                    self._unusable.warning(
                        "an answer of %s cannot be used: %s",
                        host_port(*producer),
                        invalid,
                    )
                    reason = "invalid_answer"
            search = searches.answered(
                producer,
                answer.number,
                answer.progress,
                now_s,
                reason=reason,
                ticket=ticket,
                wait_s=wait_s,
            )
            if search is not None:
                self._stop_waiting(search)
                yield search
        for search in islice(searches.give_up(now_s), MOST_AT_ONCE):
            self._stop_waiting(search)
            yield search

    def _stop_waiting(self, search: PrefixSearch) -> None:
        entry = self._requests.find(search.request_id)
        if entry is not None:
            self._parking.leave(entry)

    def _settled(self, query: PendingQuery, answer: Answer | None) -> Settled:
        entry = self._requests.find(query.request_id)
        if query.waits and entry is not None:
            self._parking.leave(entry)
        return Settled(
            request_id=query.request_id,
            waits=query.waits,
            answer=answer,
            is_crowded_out=query.is_crowded_out,
            unknown_why=query.unknown_why,
        )


def is_ticket(answer: Answer | None) -> bool:
    """True if an answer contains params to read with."""
    return answer is not None and answer.progress is PromptProgress.TICKET
