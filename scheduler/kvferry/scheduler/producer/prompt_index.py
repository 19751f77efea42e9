"""Listed prompts by what queries name: a key that clients choose, the number of tokens, and the digest of all of them.

    add ──► undigested ── a query of this length comes ──► unclaimed ── its digest is the query's ──► claimed ──► drop

A prompt answers one query, which claims it. Clients choose keys, and thousands of prompts and queries may have the same
one. So a prompt is found by its digest, and a change concerns the query that has claimed the prompt, not all queries of
its key. Used on the listener's thread, but for `is_queried`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.protocol.digests import GrowingChain
from kvferry.protocol.queries import PromptQuery
from kvferry.scheduler.requests import Claimant, ListedPrompt, Whole

# The digests of so many tokens take 50 µs.
_TOKENS_AT_ONCE = 4096

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
        listed.has_ended = True
        self._by_key[listed.key].num_running -= 1

    def drop(self, listed: ListedPrompt) -> None:
        """Forget a prompt; the query that has claimed it may claim another one."""
        key = self._by_key[listed.key]
        key.num_prompts -= 1
        key.num_running -= not listed.has_ended
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
        for num_tokens in range(_TOKENS_AT_ONCE, listed.num_tokens, _TOKENS_AT_ONCE):
            chain.grow(num_tokens)
            self._pause()
        return chain.digests(listed.num_tokens)

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
