"""Prompts that this engine prefills for others, as they ask for them: by key, with their progress.

The engine's thread reports what becomes of each prompt. The listener's thread answers questions, also while a step
runs, and is woken when an answer to a subscriber may have changed.

There is no lock, since the engine's thread would wait at it for the digests of whole prompts (256 questions about
prompts of 32,000 tokens: 160 ms), or for all subscribers of one key. The engine's thread sets the state of a prompt,
which is one value, and puts the prompt into a queue; all that is looked up by key, digest or claimant belongs to the
listener's thread. It takes from the queue before it answers.

The interpreter's lock is left, which a thread gives away after 5 ms if it does not wait for anything. So the listener's
thread sleeps for a moment after every `_HELD_S` of work.

Clients choose keys, and thousands of prompts and questions may have the same one. So a prompt is found by its digest,
and a change is looked at for the question that has claimed the prompt, not for all of its key.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TypeVar

from kvferry.protocol.digests import GrowingChain, Prompt
from kvferry.protocol.prompt_queries import (
    Answer,
    Answers,
    PromptProgress,
    PromptQuery,
    Subscribe,
    Unsubscribe,
)
from kvferry.scheduler.producer.lease import ProducerLease
from kvferry.scheduler.producer.listed_prompt import Claimant, ListedPrompt, PromptState, Whole
from kvferry.scheduler.requests import RequestTable

MAX_PROMPTS = 1 << 14
"""Most prompts remembered; the oldest is dropped first. Clients choose how many requests there are."""
MAX_SUBSCRIPTIONS = 1 << 14
"""Most questions of all askers together; the one repeated longest ago is dropped first."""
SUBSCRIPTION_S = 30.0
"""A question that is not repeated for this long is dropped."""
KEPT_S = 30.0
"""How long a prompt that is over is remembered, for consumers that come late."""

_FORGOTTEN_AT_ONCE = 256
_TOKENS_AT_ONCE = 4096
"""Their digests take 50 µs."""
_HELD_S = 100e-6
_RELEASED_S = 50e-6

Name = TypeVar("Name")


@dataclass(slots=True)
class _Subscription:
    """Attributes:
    peer: the routing id of the asker's connection.
    answered: None before the first answer.
    """

    peer: bytes
    query: PromptQuery
    repeated_s: float
    answered: PromptProgress | None = None


@dataclass(slots=True)
class _Key:
    """The prompts and questions of one key.

    Attributes:
        unknown: prompts without digests, by number of tokens and request; the newest is last.
        free: those with digests and without a claimant, by length, digest and request.
        num_prompts, num_running: all of them, and those that are not over.
        subscribed: its questions.
        waiting: those of them that have claimed no prompt.
    """

    unknown: dict[int, dict[str, ListedPrompt]] = field(default_factory=dict)
    free: dict[Whole, dict[str, ListedPrompt]] = field(default_factory=dict)
    num_prompts: int = 0
    num_running: int = 0
    subscribed: set[Claimant] = field(default_factory=set)
    waiting: dict[Claimant, None] = field(default_factory=dict)


class PromptDirectory:
    """Prompts of one engine, and questions about them.

    Args:
        siblings: ports of the side channels of this engine's other data-parallel ranks.
        clock: monotonic seconds.
        requests: this engine's; the ledger's too.

    Attributes:
        wake: called on the engine's thread when there may be `changes` to send.
    """

    def __init__(
        self,
        siblings: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        requests: RequestTable | None = None,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._siblings = siblings
        self._news: queue.SimpleQueue[ListedPrompt] = queue.SimpleQueue()
        # Of the engine's thread:
        self._requests = RequestTable() if requests is None else requests
        # Of the listener's thread:
        self._by_request: dict[str, ListedPrompt] = {}  # the first that arrived is first
        self._by_key: dict[str, _Key] = {}
        self._claimed: dict[Claimant, ListedPrompt] = {}
        self._ended_s: dict[str, float] = {}  # by request, the first that was over is first
        self._subscriptions: dict[
            Claimant, _Subscription
        ] = {}  # the one repeated longest ago is first
        self._changed: dict[Claimant, None] = {}
        self._released_s = 0.0

    # For the engine's thread. None of it waits, and each takes the same time whatever others have asked.

    def arrived(self, request_id: str, key: str, prompt: Prompt, num_tokens: int) -> None:
        """A request has arrived whose prompt is for another engine.

        Args:
            prompt: kept, and not changed until it is over.
            num_tokens: of the whole prompt.
        """
        asked = ListedPrompt(request_id, key, prompt, num_tokens)
        self._requests.enter(request_id).listed = asked
        self._report(asked)

    def ticket(
        self,
        request_id: str,
        params: object,
        lease: ProducerLease | None = None,
        *,
        cached_tokens: int | None = None,
    ) -> None:
        """The prompt may be read with these params as soon as its slot is READY, until the lease ends.

        Args:
            params: encoded when they are asked for, on the listener's thread.
            cached_tokens: see `Answer`.
        """
        asked = self._listed(request_id)
        if asked is not None:
            asked.state = PromptState(
                PromptProgress.TICKET, params, lease, cached_tokens=cached_tokens
            )
            self._report(asked)

    def waiting(self, request_id: str) -> ListedPrompt | None:
        """The prompt, if another engine has asked for it and has no answer yet. At worst a question that is being
        answered is seen in the next step."""
        asked = self._listed(request_id)
        is_waiting = (
            asked is not None
            and asked.claimant is not None
            and asked.state.progress is PromptProgress.QUEUED
        )
        return asked if is_waiting else None

    def over(self, request_id: str, reason: str = "") -> None:
        """With a reason, the prompt will not be read; otherwise its ticket stays valid."""
        asked = self._listed(request_id)
        if asked is not None:
            if reason:
                asked.state = PromptState(PromptProgress.OVER, reason=reason)
            asked.is_over = True
            self._report(asked)

    def finished(self, request_id: str, reason: str = "") -> None:
        """As `over`, for the last time: the request has ended."""
        self.over(request_id, reason)
        record = self._requests.find(request_id)
        if record is not None:
            record.listed = None
            self._requests.drop_if_over(record)

    # For the listener's thread.

    @property
    def has_news(self) -> bool:
        """Whether the engine's thread has reported something since the last `ask` or `changes`."""
        return not self._news.empty()

    def ask(self, peer: bytes, ask: Subscribe) -> Answers:
        """Answer questions, and remember them until they are settled."""
        self._released_s = time.perf_counter()
        now_s = self._clock()
        for query in ask.queries:
            self._subscribe((ask.client_id, query.number), _Subscription(peer, query, now_s))
        # Only now: the engine's thread looks at the subscriptions after it has reported.
        self._take_news()
        answers = [
            self._answer_again((ask.client_id, query.number), query) for query in ask.queries
        ]
        return Answers(answers=tuple(answers), siblings=self._siblings)

    def unask(self, unask: Unsubscribe) -> None:
        """These questions are settled."""
        for number in unask.numbers:
            self._unsubscribe((unask.client_id, number))

    def changes(self) -> list[tuple[bytes, Answers]]:
        """New answers to remembered questions since the last call, by connection."""
        self._released_s = time.perf_counter()
        self._take_news()
        found: dict[bytes, list[Answer]] = {}
        changed, self._changed = self._changed, {}
        for claimant in changed:
            subscription = self._subscriptions.get(claimant)
            if subscription is None:
                continue
            answered = subscription.answered
            answer = self._answer_again(claimant, subscription.query)
            if answer.progress is not answered:
                found.setdefault(subscription.peer, []).append(answer)
        return [
            (peer, Answers(answers=tuple(answers), siblings=self._siblings))
            for peer, answers in found.items()
        ]

    # On the engine's thread.

    def _listed(self, request_id: str) -> ListedPrompt | None:
        record = self._requests.find(request_id)
        return record.listed if record is not None else None

    def _report(self, asked: ListedPrompt) -> None:
        self._news.put(asked)
        key = self._by_key.get(asked.key)
        if key is not None and key.subscribed:
            self.wake()

    # On the listener's thread.

    def _take_news(self) -> None:
        self._forget_old()
        while not self._news.empty():
            asked = self._news.get_nowait()
            if not asked.is_dropped:
                self._look_at(asked)

    def _look_at(self, asked: ListedPrompt) -> None:
        """Take in what the engine's thread has reported of a prompt."""
        if self._by_request.get(asked.request_id) is not asked:
            self._add(asked)
        elif asked.claimant is not None and asked.claimant in self._subscriptions:
            self._changed[asked.claimant] = None
        if asked.is_over and not asked.has_ended:
            asked.has_ended = True
            self._by_key[asked.key].num_running -= 1
            self._ended_s[asked.request_id] = self._clock()

    def _add(self, asked: ListedPrompt) -> None:
        self._drop(asked.request_id)
        self._by_request[asked.request_id] = asked
        key = self._by_key.setdefault(asked.key, _Key())
        key.num_prompts += 1
        key.num_running += 1
        key.unknown.setdefault(asked.num_tokens, {})[asked.request_id] = asked
        self._changed.update(key.waiting)
        while len(self._by_request) > MAX_PROMPTS:
            self._drop(next(iter(self._by_request)))

    def _answer_again(self, claimant: Claimant, query: PromptQuery) -> Answer:
        """The answer to a subscriber. One that is over ends the subscription: who asks again is answered again."""
        answer = self._answer(claimant, query)
        subscription = self._subscriptions.get(claimant)
        if subscription is not None:
            subscription.answered = answer.progress
            if answer.progress is PromptProgress.OVER:
                self._unsubscribe(claimant)
        self._pause()
        return answer

    def _answer(self, claimant: Claimant, query: PromptQuery) -> Answer:
        """Of the prompt with this key that the question has claimed, or of one that agrees and has no claimant."""
        key = self._by_key.get(query.key)
        claimed = self._claimed.get(claimant)
        whole = (query.num_tokens, query.digest)
        if claimed is None or claimed.key != query.key or claimed.whole != whole:
            claimed = self._free(key, query) if key is not None else None
            if claimed is not None:
                claimed.spans = query.spans
                claimed.claimant = claimant
                self._claimed[claimant] = claimed
        if key is not None and claimed is not None:
            key.waiting.pop(claimant, None)
            return claimed.answer(query.number)
        # Not OVER where the key has other prompts: then a client could tell from the time of its answer whether a
        # request with an id that it has guessed runs. Its engine waits as for an id that nobody has.
        has_others = key is not None and key.num_running > 0
        return Answer(
            number=query.number,
            progress=PromptProgress.UNKNOWN,
            reason="other_prompt" if has_others else "",
        )

    def _free(self, key: _Key, query: PromptQuery) -> ListedPrompt | None:
        """Take a prompt that agrees with a question and has no claimant. Each prompt is digested once."""
        whole = (query.num_tokens, query.digest)
        free = key.free.get(whole)
        if free is not None:
            _, asked = free.popitem()
            if not free:
                del key.free[whole]
            return asked
        unknown = key.unknown.get(query.num_tokens, {})
        while unknown:
            request_id, asked = unknown.popitem()
            if not unknown:
                del key.unknown[query.num_tokens]
            asked.digests = self._digest(asked)
            if asked.whole == whole:
                return asked
            key.free.setdefault(asked.whole, {})[request_id] = asked
        return None

    def _digest(self, asked: ListedPrompt) -> tuple[str, ...]:
        chain = GrowingChain(asked.prompt)
        for num_tokens in range(_TOKENS_AT_ONCE, asked.num_tokens, _TOKENS_AT_ONCE):
            chain.grow(num_tokens)
            self._pause()
        return chain.digests(asked.num_tokens)

    def _pause(self) -> None:
        """Give the interpreter's lock away if it was held for `_HELD_S`: the engine's thread would wait for 5 ms."""
        if time.perf_counter() >= self._released_s + _HELD_S:
            time.sleep(_RELEASED_S)
            self._released_s = time.perf_counter()

    def _forget_old(self) -> None:
        now_s = self._clock()
        ended = takewhile(lambda entry: now_s >= entry[1] + KEPT_S, self._ended_s.items())
        for request_id, _ in list(islice(ended, _FORGOTTEN_AT_ONCE)):
            self._drop(request_id)
        stale = takewhile(
            lambda entry: now_s >= entry[1].repeated_s + SUBSCRIPTION_S, self._subscriptions.items()
        )
        for claimant, _ in list(islice(stale, _FORGOTTEN_AT_ONCE)):
            self._unsubscribe(claimant)

    def _drop(self, request_id: str) -> None:
        asked = self._by_request.pop(request_id, None)
        if asked is None:
            return
        asked.is_dropped = True
        self._ended_s.pop(request_id, None)
        key = self._by_key[asked.key]
        key.num_prompts -= 1
        key.num_running -= not asked.has_ended
        if asked.claimant is not None:
            if self._claimed.get(asked.claimant) is asked:
                del self._claimed[asked.claimant]
            if asked.claimant in key.subscribed:
                key.waiting[asked.claimant] = None
        elif asked.digests:
            _remove(key.free, asked.whole, request_id)
        else:
            _remove(key.unknown, asked.num_tokens, request_id)
        self._forget_if_empty(asked.key, key)

    def _subscribe(self, claimant: Claimant, subscription: _Subscription) -> None:
        self._unsubscribe(claimant)
        self._subscriptions[claimant] = subscription
        key = self._by_key.setdefault(subscription.query.key, _Key())
        key.subscribed.add(claimant)
        key.waiting[claimant] = None
        if len(self._subscriptions) > MAX_SUBSCRIPTIONS:
            self._unsubscribe(next(iter(self._subscriptions)))

    def _unsubscribe(self, claimant: Claimant) -> None:
        subscription = self._subscriptions.pop(claimant, None)
        if subscription is None:
            return
        key = self._by_key[subscription.query.key]
        key.subscribed.discard(claimant)
        key.waiting.pop(claimant, None)
        self._forget_if_empty(subscription.query.key, key)

    def _forget_if_empty(self, name: str, key: _Key) -> None:
        if not key.num_prompts and not key.subscribed:
            del self._by_key[name]


def _remove(found: dict[Name, dict[str, ListedPrompt]], name: Name, request_id: str) -> None:
    same = found[name]
    del same[request_id]
    if not same:
        del found[name]
