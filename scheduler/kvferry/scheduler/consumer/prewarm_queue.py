"""Producers that the workers shake hands with before the first load from them is ordered."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvferry.link.limits import has_share
from kvferry.protocol.hosts import one_spelling
from kvferry.protocol.orders import Prewarm

AGAIN_S = 10.0
"""Interval between prewarms of a producer. For a known one they cost a worker one table lookup."""
MAX_NAMED = 4096
"""Most producers remembered; the least recently named is dropped. Clients choose what params name."""
MAX_WAITING = 64
"""Most prewarms in the orders of one step, static peers apart; of one host no more than are free, so that others get
some. Loads from producers that are left out begin with a handshake."""


class PrewarmQueue:
    """Producers that the workers prewarm before the first load from them is ordered.

    The handshake (a description, a plan, a first read) then proceeds while the request waits. A worker that drops a
    producer does not report it here: so the next request that names it queues it again after `AGAIN_S`, or after a load
    from it has failed.
    """

    def __init__(self) -> None:
        # When each was queued last; the one that was named last is last. The workers may have dropped one since without
        # a word, so it is queued again after `AGAIN_S`.
        self._named_s: dict[Prewarm, float] = {}
        self._waiting: list[Prewarm] = []
        # Of those that clients have named: static peers have no share.
        self._by_host: Counter[str] = Counter()

    def expect(self, producer: Prewarm, now_s: float) -> None:
        """A request will read from this producer, or a static peer has answered. `now_s` is of any monotonic clock."""
        # One entry, whether an operator or a client has named it.
        named = msgspec.structs.replace(producer, is_static=False)
        # A static peer has no share: the operator has listed it, so there are few, and each is wanted.
        if not producer.is_static and not self._may_wait(named, now_s):
            return
        self._waiting.append(producer)
        self.forget(named)
        self._named_s[named] = now_s
        if len(self._named_s) > MAX_NAMED:
            del self._named_s[next(iter(self._named_s))]

    def forget(self, producer: Prewarm) -> None:
        """The workers may have lost it: the next request names it again."""
        self._named_s.pop(producer, None)

    def _may_wait(self, producer: Prewarm, now_s: float) -> bool:
        """Take a place for a producer that a client has named. False if it was prewarmed lately, or has no share."""
        named_s = self._named_s.get(producer)
        if named_s is not None and now_s < named_s + AGAIN_S:
            return False
        host = one_spelling(producer.host)
        if not has_share(self._by_host[host], self._by_host.total(), MAX_WAITING):
            return False
        self._by_host[host] += 1
        return True

    def take(self) -> tuple[Prewarm, ...]:
        """The producers to prewarm since the last call."""
        waiting = tuple(self._waiting)
        self._waiting.clear()
        self._by_host.clear()
        return waiting
