"""Prompts that this engine prefills for others, by the key of their queries, with their progress.

    the engine's thread                          the listener's thread
    arrived, ticket, over ── queue of prompts ──► subscribe, unsubscribe, changes ── Answers ──► clients

The engine's thread reports what becomes of each prompt. The listener's thread answers queries, also while a step runs,
and is woken when an answer to a subscriber may have changed. Which prompt a query is about is the index's:

    add ──► undigested ── a query of this length comes ──► unclaimed ── its digest is the query's ──► claimed ──► drop

A prompt answers one query, which claims it. Clients choose keys, and thousands of prompts and queries may have the same
one. So a prompt is found by its digest, and a change concerns the query that has claimed the prompt, not all queries of
its key.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvferry.link.lock_pauses import LockPauses
from kvferry.protocol.digests import GrowingChain, Prompt, UncoveredToken
from kvferry.protocol.queries import (
    Answer,
    Answers,
    PromptProgress,
    PromptQuery,
    Subscribe,
    Unsubscribe,
)
from kvferry.scheduler.requests import (
    Claimant,
    ListedPrompt,
    ProducerLease,
    PromptState,
    RequestTable,
    Whole,
)

# Clients choose how many requests there are.
MAX_PROMPTS = 1 << 14
"""Most prompts remembered; the oldest is dropped first."""
MAX_SUBSCRIPTIONS = 1 << 14
"""Most queries of all clients together; the one repeated longest ago is dropped first."""
SUBSCRIPTION_S = 30.0
"""A query that is not repeated for this long is dropped."""
KEPT_S = 30.0
"""How long a prompt that is over is remembered, for consumers that come late."""

FAILED = "ended"
"""The reason of a prompt that is over because its request was aborted or has failed."""

_FORGOTTEN_AT_ONCE = 256


@dataclass(slots=True)
class _Subscription:
    """A query that is answered again whenever the answer changes.

    Attributes:
        peer: the routing id of the client's connection.
        answered: None before the first answer.
    """

    peer: bytes
    query: PromptQuery
    repeated_s: float
    answered: PromptProgress | None = None


@dataclass(frozen=True, slots=True)
class PromptDirectorySnapshot:
    """The directory at one moment.

    Attributes:
        prompts: the state of each prompt, by request; the first that arrived is first.
        keys: of prompts and of queries.
        subscriptions: the queries that wait for a change, by client and number.
    """

    prompts: Mapping[str, PromptProgress]
    keys: frozenset[str]
    subscriptions: frozenset[Claimant]


class PromptDirectory:
    """Prompts of one engine, and queries about them.

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
        # No lock: the engine's thread would wait at it for the digests of whole prompts (256 queries about prompts of
        # 32,000 tokens: 160 ms), or for all subscribers of one key. It sets the state of a prompt, which is one value,
        # and puts the prompt into this queue. All that is found by key, digest or claimant belongs to the listener's
        # thread, which takes from the queue before it answers.
        self._news: queue.SimpleQueue[ListedPrompt] = queue.SimpleQueue()
        # Of the engine's thread:
        if requests is None:
            requests = RequestTable()
        self._requests = requests
        # Of the listener's thread:
        # The first that arrived is first.
        self._by_request: dict[str, ListedPrompt] = {}
        self._pauses = LockPauses()
        self._index = PromptIndex(self._pauses.pause)
        # By request; the first that was over is first.
        self._ended_s: dict[str, float] = {}
        # The one repeated longest ago is first.
        self._subscriptions: dict[Claimant, _Subscription] = {}
        self._changed: dict[Claimant, None] = {}

    # For the engine's thread. None of it waits, and each takes the same time whatever others query.

    def arrived(
        self, request_id: str, key: str, prompt: Prompt, num_tokens: int
    ) -> None:
        """A request has arrived whose prompt is for another engine.

        Args:
            prompt: kept, and not changed until it is over.
            num_tokens: of the whole prompt.
        """
        listed = ListedPrompt(request_id, key, prompt, num_tokens)
        self._requests.enter(request_id).listed = listed
        self._report(listed)

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
            params: encoded for the first query, on the listener's thread.
            cached_tokens: see `Answer`.
        """
        listed = self._listed(request_id)
        if listed is not None:
            listed.state = PromptState(
                PromptProgress.TICKET, params, lease, cached_tokens=cached_tokens
            )
            self._report(listed)

    def waiting(self, request_id: str) -> ListedPrompt | None:
        """The prompt, if another engine has queried it and has no ticket yet."""
        # Read without a lock: at worst a query that is being answered is seen in the next step.
        listed = self._listed(request_id)
        if listed is None or listed.claimant is None:
            return None
        if listed.state.progress is not PromptProgress.QUEUED:
            return None
        return listed

    def over(self, request_id: str, reason: str = "") -> None:
        """With a reason, the prompt will not be read; otherwise its ticket stays valid."""
        listed = self._listed(request_id)
        if listed is not None:
            if reason:
                listed.state = PromptState(PromptProgress.OVER, reason=reason)
            listed.is_over = True
            self._report(listed)

    def finished(self, request_id: str, reason: str = "") -> None:
        """As `over`, for the last time: the request has ended."""
        self.over(request_id, reason)
        record = self._requests.get(request_id)
        if record is not None:
            record.listed = None
            self._requests.drop_if_over(record)

    # For the listener's thread.

    @property
    def has_news(self) -> bool:
        """Whether the engine's thread has reported something since the last `subscribe` or `changes`."""
        return not self._news.empty()

    def subscribe(self, peer: bytes, request: Subscribe) -> Answers:
        """Answer queries, and remember them until they are settled."""
        self._pauses.begin()
        now_s = self._clock()
        for query in request.queries:
            claimant = (request.client_id, query.number)
            self._add_subscription(claimant, _Subscription(peer, query, now_s))
        # Only now: the engine's thread looks at the subscriptions after it has reported. The other way round a report
        # between the two would wake nobody.
        self._take_news()
        answers = [
            self._answer_again((request.client_id, query.number), query)
            for query in request.queries
        ]
        return Answers(answers=tuple(answers), siblings=self._siblings)

    def snapshot(self) -> PromptDirectorySnapshot:
        """What the listener's thread knows now. May be called on another thread while that one waits."""
        prompts = dict(self._by_request)
        return PromptDirectorySnapshot(
            prompts={name: prompt.state.progress for name, prompt in prompts.items()},
            keys=self._index.keys(),
            subscriptions=frozenset(self._subscriptions),
        )

    def unsubscribe(self, request: Unsubscribe) -> None:
        """These queries are settled."""
        for number in request.numbers:
            self._end_subscription((request.client_id, number))

    def changes(self) -> list[tuple[bytes, Answers]]:
        """New answers to remembered queries since the last call, by connection."""
        self._pauses.begin()
        self._take_news()
        changed = self._changed
        self._changed = {}
        answers_by_peer: dict[bytes, list[Answer]] = {}
        for claimant in changed:
            subscription = self._subscriptions.get(claimant)
            if subscription is None:
                continue
            answered = subscription.answered
            answer = self._answer_again(claimant, subscription.query)
            if answer.progress is not answered:
                answers_by_peer.setdefault(subscription.peer, []).append(answer)
        return [
            (peer, Answers(answers=tuple(answers), siblings=self._siblings))
            for peer, answers in answers_by_peer.items()
        ]

    # On the engine's thread.

    def _listed(self, request_id: str) -> ListedPrompt | None:
        record = self._requests.get(request_id)
        if record is None:
            return None
        return record.listed

    def _report(self, listed: ListedPrompt) -> None:
        self._news.put(listed)
        if self._index.is_queried(listed.key):
            self.wake()

    # On the listener's thread.

    def _take_news(self) -> None:
        self._forget_old()
        while not self._news.empty():
            listed = self._news.get_nowait()
            if not listed.is_dropped:
                self._take_in(listed)

    def _take_in(self, listed: ListedPrompt) -> None:
        """Take in what the engine's thread has reported of a prompt."""
        if self._by_request.get(listed.request_id) is not listed:
            self._add(listed)
        elif listed.claimant is not None and listed.claimant in self._subscriptions:
            self._changed[listed.claimant] = None
        if not listed.is_over or listed.is_known_over:
            return
        if listed.claimant is None and listed.state.reason == FAILED:
            # Nobody has asked for it. Who asks under its key from now on may mean a retry of it, which is on its way: a
            # router that fails over to another decoder repeats both legs.
            self._drop(listed.request_id)
            return
        self._index.ended(listed)
        self._ended_s[listed.request_id] = self._clock()

    def _add(self, listed: ListedPrompt) -> None:
        self._drop(listed.request_id)
        self._by_request[listed.request_id] = listed
        self._changed.update(self._index.add(listed))
        while len(self._by_request) > MAX_PROMPTS:
            self._drop(next(iter(self._by_request)))

    def _answer_again(self, claimant: Claimant, query: PromptQuery) -> Answer:
        """The answer to a subscriber."""
        answer = self._answer(claimant, query)
        subscription = self._subscriptions.get(claimant)
        if subscription is not None:
            subscription.answered = answer.progress
            # A client that sends the query again is answered again.
            if answer.progress is PromptProgress.OVER:
                self._end_subscription(claimant)
        self._pauses.pause()
        return answer

    def _answer(self, claimant: Claimant, query: PromptQuery) -> Answer:
        """The answer about the prompt that the query has claimed, or claims now."""
        listed = self._index.claim(claimant, query)
        if listed is not None:
            return listed.answer(query.number)
        # Not OVER where the key has other prompts: then a client could tell from the time of its answer whether a
        # request with an id that it has guessed runs. Its engine waits as for an id that nobody has.
        reason = "other_prompt" if self._index.has_running(query.key) else ""
        return Answer(
            number=query.number, progress=PromptProgress.UNKNOWN, reason=reason
        )

    def _forget_old(self) -> None:
        # Both tables are in the order of their times, so the old ones are first.
        now_s = self._clock()
        old_requests = []
        for request_id, ended_s in islice(self._ended_s.items(), _FORGOTTEN_AT_ONCE):
            if now_s < ended_s + KEPT_S:
                break
            old_requests.append(request_id)
        for request_id in old_requests:
            self._drop(request_id)

        old_claimants = []
        for claimant, subscription in islice(
            self._subscriptions.items(), _FORGOTTEN_AT_ONCE
        ):
            if now_s < subscription.repeated_s + SUBSCRIPTION_S:
                break
            old_claimants.append(claimant)
        for claimant in old_claimants:
            self._end_subscription(claimant)

    def _drop(self, request_id: str) -> None:
        listed = self._by_request.pop(request_id, None)
        if listed is None:
            return
        listed.is_dropped = True
        self._ended_s.pop(request_id, None)
        self._index.drop(listed)

    def _add_subscription(
        self, claimant: Claimant, subscription: _Subscription
    ) -> None:
        self._end_subscription(claimant)
        self._subscriptions[claimant] = subscription
        self._index.subscribe(claimant, subscription.query.key)
        if len(self._subscriptions) > MAX_SUBSCRIPTIONS:
            self._end_subscription(next(iter(self._subscriptions)))

    def _end_subscription(self, claimant: Claimant) -> None:
        subscription = self._subscriptions.pop(claimant, None)
        if subscription is None:
            return
        self._index.unsubscribe(claimant, subscription.query.key)


# Which prompt a query is about.


# The digests of so many tokens take 50 µs.
_TOKENS_AT_ONCE = 4096

_NOBODYS = ("",)
"""The digests of a prompt that no query can be about: one of its tokens has none."""

Name = TypeVar("Name")


@dataclass(slots=True)
class _Key:
    """The prompts and queries of one key.

    Attributes:
        undigested: prompts without digests, by number of tokens and request; the newest is last.
        unclaimed: those with digests and without a claimant, by length, digest and request.
        num_prompts, num_running: all of them, and those that are not over.
        subscribed: its queries.
        waiting: those of them that have claimed no prompt.
    """

    undigested: dict[int, dict[str, ListedPrompt]] = field(default_factory=dict)
    unclaimed: dict[Whole, dict[str, ListedPrompt]] = field(default_factory=dict)
    num_prompts: int = 0
    num_running: int = 0
    subscribed: set[Claimant] = field(default_factory=set)
    waiting: dict[Claimant, None] = field(default_factory=dict)


class PromptIndex:
    """The prompts of one engine, and the queries that may claim them.

    Args:
        pause: called between parts of a long prompt's digests.
    """

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause
        self._by_key: dict[str, _Key] = {}
        self._claimed: dict[Claimant, ListedPrompt] = {}

    def keys(self) -> frozenset[str]:
        """Of prompts and of queries."""
        return frozenset(self._by_key)

    def is_queried(self, name: str) -> bool:
        """Whether any query has this key. May be called on any thread: at worst it is late by one query."""
        key = self._by_key.get(name)
        return key is not None and bool(key.subscribed)

    def has_running(self, name: str) -> bool:
        """Whether any prompt of this key is not over."""
        key = self._by_key.get(name)
        return key is not None and key.num_running > 0

    # Prompts.

    def add(self, listed: ListedPrompt) -> Mapping[Claimant, None]:
        """Add a prompt. Returns the queries of its key that have no prompt: it may be theirs."""
        key = self._by_key.setdefault(listed.key, _Key())
        key.num_prompts += 1
        key.num_running += 1
        key.undigested.setdefault(listed.num_tokens, {})[listed.request_id] = listed
        return key.waiting

    def ended(self, listed: ListedPrompt) -> None:
        """A prompt is over. It is still found."""
        listed.is_known_over = True
        self._by_key[listed.key].num_running -= 1

    def drop(self, listed: ListedPrompt) -> None:
        """Forget a prompt; the query that has claimed it may claim another one."""
        key = self._by_key[listed.key]
        key.num_prompts -= 1
        key.num_running -= not listed.is_known_over
        if listed.claimant is not None:
            if self._claimed.get(listed.claimant) is listed:
                del self._claimed[listed.claimant]
            if listed.claimant in key.subscribed:
                key.waiting[listed.claimant] = None
        elif listed.digests:
            _remove(key.unclaimed, listed.whole, listed.request_id)
        else:
            _remove(key.undigested, listed.num_tokens, listed.request_id)
        self._forget_if_empty(listed.key, key)

    # Queries.

    def subscribe(self, claimant: Claimant, name: str) -> None:
        """A query of this key waits for a prompt."""
        key = self._by_key.setdefault(name, _Key())
        key.subscribed.add(claimant)
        key.waiting[claimant] = None

    def unsubscribe(self, claimant: Claimant, name: str) -> None:
        """A query of this key is settled; what it has claimed stays its own."""
        key = self._by_key[name]
        key.subscribed.discard(claimant)
        key.waiting.pop(claimant, None)
        self._forget_if_empty(name, key)

    def claim(self, claimant: Claimant, query: PromptQuery) -> ListedPrompt | None:
        """The prompt that a query has claimed, or claims now; None if there is none."""
        key = self._by_key.get(query.key)
        if key is None:
            return None
        whole = (query.num_tokens, query.digest)
        listed = self._claimed.get(claimant)
        if listed is None or listed.key != query.key or listed.whole != whole:
            listed = self._take_unclaimed(key, whole)
            if listed is None:
                return None
            # The claimant last: the engine's thread reads the others once it is set.
            listed.spans = query.spans
            listed.claimant = claimant
            self._claimed[claimant] = listed
        key.waiting.pop(claimant, None)
        return listed

    def _take_unclaimed(self, key: _Key, whole: Whole) -> ListedPrompt | None:
        """Take a prompt of this length and digest that has no claimant."""
        unclaimed = key.unclaimed.get(whole)
        if unclaimed is not None:
            _, listed = unclaimed.popitem()
            if not unclaimed:
                del key.unclaimed[whole]
            return listed
        # Each prompt is digested once, when a query of its length comes first.
        num_tokens, _ = whole
        undigested = key.undigested.get(num_tokens, {})
        while undigested:
            request_id, listed = undigested.popitem()
            if not undigested:
                del key.undigested[num_tokens]
            listed.digests = self._digest(listed)
            if listed.whole == whole:
                return listed
            key.unclaimed.setdefault(listed.whole, {})[request_id] = listed
        return None

    def _digest(self, listed: ListedPrompt) -> tuple[str, ...]:
        chain = GrowingChain(listed.prompt)
        try:
            for num_tokens in range(
                _TOKENS_AT_ONCE, listed.num_tokens, _TOKENS_AT_ONCE
            ):
                chain.grow(num_tokens)
                self._pause()
            return chain.digests(listed.num_tokens)
        except UncoveredToken:
            return _NOBODYS

    def _forget_if_empty(self, name: str, key: _Key) -> None:
        if not key.num_prompts and not key.subscribed:
            del self._by_key[name]


def _remove(
    prompts: dict[Name, dict[str, ListedPrompt]], name: Name, request_id: str
) -> None:
    by_request = prompts[name]
    del by_request[request_id]
    if not by_request:
        del prompts[name]
