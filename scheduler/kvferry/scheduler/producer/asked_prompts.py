"""Prompts that this engine prefills for others, as they ask for them: by key, with their progress.

The engine's thread reports what becomes of each prompt. The listener's thread answers questions, also while a step
runs, and is woken when an answer to a subscriber has changed. A lock guards both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from kvferry.protocol.asks import Answer, Answers, Ask, Progress, Question, Unask
from kvferry.protocol.digests import Prompt, digest_chain
from kvferry.scheduler.producer.lease import Lease

MAX_PROMPTS = 1 << 14
"""Most prompts remembered; the oldest is dropped first. Clients choose how many requests there are."""
MAX_SUBSCRIPTIONS = 1 << 14
"""Most questions of all askers together; the one repeated longest ago is dropped first."""
SUBSCRIPTION_S = 30.0
"""A question that is not repeated for this long is dropped."""
KEPT_S = 30.0
"""How long a prompt that is over is remembered, for consumers that come late."""

Claimant = tuple[str, int]
"""Engine id of an asker, and the number of its question."""


@dataclass(slots=True, eq=False)
class AskedPrompt:
    """One prompt.

    Attributes:
        lease: by which it may be read, as long as that has not ended.
        cached_tokens: see `Answer`.
        claimant: whose question it answers.
        spans: of who has asked (`Question`).
        digests: of the whole prompt; () until a question is compared with them.
    """

    request_id: str
    key: str
    prompt: Prompt
    num_tokens: int
    progress: Progress = Progress.QUEUED
    params: dict[str, Any] = field(default_factory=dict)
    lease: Lease | None = None
    reason: str = ""
    cached_tokens: int | None = None
    claimant: Claimant | None = None
    spans: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()

    def agrees(self, question: Question) -> bool:
        if question.num_tokens != self.num_tokens:
            return False
        if not self.digests:
            self.digests = digest_chain(self.prompt, self.num_tokens)
        return question.digest == self.digests[-1]

    def answer(self, number: int) -> Answer:
        if self.lease is not None and self.lease.ended_by:
            return Answer(number=number, progress=Progress.OVER, reason=self.reason or "no_lease")
        return Answer(
            number=number,
            progress=self.progress,
            params=self.params,
            reason=self.reason,
            cached_tokens=self.cached_tokens,
        )


@dataclass(slots=True)
class _Subscription:
    """Attributes:
    peer: the routing id of the asker's connection.
    """

    peer: bytes
    question: Question
    repeated_s: float
    answered: Progress


class AskedPrompts:
    """Prompts of one engine, and questions about them.

    Args:
        siblings: ports of the side channels of this engine's other data-parallel ranks.
        clock: monotonic seconds.

    Attributes:
        wake: called on the engine's thread when there are `changes` to send.
    """

    def __init__(self, siblings: tuple[int, ...] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._siblings = siblings
        self._lock = threading.Lock()
        self._by_request: dict[str, AskedPrompt] = {}  # the first that arrived is first
        self._by_key: dict[str, list[AskedPrompt]] = {}
        self._claimed: dict[Claimant, AskedPrompt] = {}
        self._ended_s: dict[str, float] = {}  # by request, the first that was over is first
        self._subscriptions: dict[Claimant, _Subscription] = {}  # the one repeated longest ago is first
        self._subscribed: dict[str, set[Claimant]] = {}
        self._changed: set[str] = set()

    # For the engine's thread.

    def arrived(self, request_id: str, key: str, prompt: Prompt, num_tokens: int) -> None:
        """A request has arrived whose prompt is for another engine.

        Args:
            prompt: kept, and not changed until it is over.
            num_tokens: of the whole prompt.
        """
        with self._lock:
            self._forget_old()
            self._drop(request_id)
            asked = self._by_request[request_id] = AskedPrompt(request_id, key, prompt, num_tokens)
            self._by_key.setdefault(key, []).append(asked)
            while len(self._by_request) > MAX_PROMPTS:
                self._drop(next(iter(self._by_request)))
            self._note(key)

    def ticket(
        self,
        request_id: str,
        params: dict[str, Any],
        lease: Lease | None = None,
        *,
        cached_tokens: int | None = None,
    ) -> None:
        """The prompt may be read with these params as soon as its slot is READY, until the lease ends.

        Args:
            cached_tokens: see `Answer`.
        """
        with self._lock:
            asked = self._by_request.get(request_id)
            if asked is not None:
                asked.progress, asked.params, asked.lease = Progress.TICKET, params, lease
                asked.cached_tokens = cached_tokens
                self._note(asked.key)

    def waiting(self, request_id: str) -> AskedPrompt | None:
        """The prompt, if another engine has asked for it and has no answer yet. It takes no lock: at worst a question
        that is being answered is seen in the next step."""
        asked = self._by_request.get(request_id)
        is_waiting = asked is not None and asked.claimant is not None and asked.progress is Progress.QUEUED
        return asked if is_waiting else None

    def over(self, request_id: str, reason: str = "") -> None:
        """The request is over. With a reason its prompt will not be read; otherwise its ticket stays valid."""
        with self._lock:
            asked = self._by_request.get(request_id)
            if asked is not None:
                self._ended_s.setdefault(request_id, self._clock())
                if reason:
                    asked.progress, asked.params, asked.reason = Progress.OVER, {}, reason
                    self._note(asked.key)

    # For the listener's thread.

    def ask(self, peer: bytes, ask: Ask) -> Answers:
        """Answer questions, and remember them until they are settled."""
        now_s = self._clock()
        with self._lock:
            answers = []
            for question in ask.questions:
                claimant = (ask.asker, question.number)
                answer = self._answer(claimant, question)
                self._unsubscribe(claimant)
                if answer.progress is not Progress.OVER:
                    self._subscribe(claimant, _Subscription(peer, question, now_s, answer.progress))
                answers.append(answer)
        return Answers(answers=tuple(answers), siblings=self._siblings)

    def unask(self, unask: Unask) -> None:
        """These questions are settled."""
        with self._lock:
            for number in unask.numbers:
                self._unsubscribe((unask.asker, number))

    def changes(self) -> list[tuple[bytes, Answers]]:
        """New answers to remembered questions since the last call, by connection."""
        if not self._changed:
            return []
        found: dict[bytes, list[Answer]] = {}
        with self._lock:
            changed, self._changed = self._changed, set()
            for claimant in [claimant for key in changed for claimant in self._subscribed.get(key, ())]:
                subscription = self._subscriptions[claimant]
                answer = self._answer(claimant, subscription.question)
                if answer.progress is not subscription.answered:
                    subscription.answered = answer.progress
                    found.setdefault(subscription.peer, []).append(answer)
        return [(peer, Answers(answers=tuple(answers), siblings=self._siblings)) for peer, answers in found.items()]

    # With the lock.

    def _answer(self, claimant: Claimant, question: Question) -> Answer:
        """The prompt with this key that the question has claimed, or the newest one that agrees and has no claimant."""
        known, claimed = self._by_key.get(question.key, []), self._claimed.get(claimant)
        if claimed is None or claimed.key != question.key or not claimed.agrees(question):
            free = (asked for asked in reversed(known) if asked.claimant is None and asked.agrees(question))
            claimed = next(free, None)
        if claimed is not None:
            self._claimed[claimant] = claimed
            claimed.claimant, claimed.spans = claimant, question.spans
            return claimed.answer(question.number)
        if all(asked.request_id in self._ended_s for asked in known):
            return Answer(number=question.number, progress=Progress.UNKNOWN)
        return Answer(number=question.number, progress=Progress.OVER, reason="other_prompt")

    def _note(self, key: str) -> None:
        if key in self._subscribed:
            self._changed.add(key)
            self.wake()

    def _forget_old(self) -> None:
        now_s = self._clock()
        for request_id, _ in list(takewhile(lambda ended: now_s >= ended[1] + KEPT_S, self._ended_s.items())):
            self._drop(request_id)
        stale = takewhile(lambda x: now_s >= x[1].repeated_s + SUBSCRIPTION_S, self._subscriptions.items())
        for claimant, _ in list(stale):
            self._unsubscribe(claimant)

    def _drop(self, request_id: str) -> None:
        asked = self._by_request.pop(request_id, None)
        if asked is None:
            return
        self._ended_s.pop(request_id, None)
        if asked.claimant is not None and self._claimed.get(asked.claimant) is asked:
            del self._claimed[asked.claimant]
        same = self._by_key[asked.key]
        same.remove(asked)
        if not same:
            del self._by_key[asked.key]

    def _subscribe(self, claimant: Claimant, subscription: _Subscription) -> None:
        self._subscriptions[claimant] = subscription
        self._subscribed.setdefault(subscription.question.key, set()).add(claimant)
        if len(self._subscriptions) > MAX_SUBSCRIPTIONS:
            self._unsubscribe(next(iter(self._subscriptions)))

    def _unsubscribe(self, claimant: Claimant) -> None:
        subscription = self._subscriptions.pop(claimant, None)
        if subscription is None:
            return
        same = self._subscribed[subscription.question.key]
        same.discard(claimant)
        if not same:
            del self._subscribed[subscription.question.key]
