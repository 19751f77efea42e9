"""Producers that the workers prewarm before the first load from them is scheduled.

The handshake (a description, a plan, a first read) then proceeds while the request waits in the queue. A worker that
drops a producer, because it is lost or to make place for others, does not report it here: so the next request that
names it queues it again after `AGAIN_S`, or after a load from it has failed.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.orders import Prewarm

AGAIN_S = 10.0
"""Interval between prewarms of a producer. For a known one they cost a worker one table lookup."""
MAX_NAMED = 4096
"""Most producers remembered; the least recently named is dropped. Clients choose what params name."""
MAX_WAITING = 64
"""Most prewarms in the orders of one step, static peers apart. Loads from other producers begin with a handshake."""


class PrewarmQueue:
    """Used by the ledger. `now_s` is from any monotonic clock."""

    def __init__(self) -> None:
        self._named_s: dict[Prewarm, float] = {}  # the one named last is last
        self._waiting: list[Prewarm] = []

    def __len__(self) -> int:
        """The number of producers remembered."""
        return len(self._named_s)

    def expect(self, producer: Prewarm, now_s: float) -> None:
        """A request has arrived whose blocks will be read from this producer."""
        named_s = self._named_s.get(producer)
        if len(self._waiting) >= MAX_WAITING or (named_s is not None and now_s < named_s + AGAIN_S):
            return
        self._remember(producer, now_s)
        self._waiting.append(producer)

    def add_static(self, producer: Prewarm, now_s: float) -> None:
        """A static peer has answered, for the first time or after a restart."""
        self._remember(msgspec.structs.replace(producer, is_static=False), now_s)
        self._waiting.append(producer)

    def forget(self, producer: Prewarm) -> None:
        """The workers may have lost it: the next request names it again."""
        self._named_s.pop(producer, None)

    def take(self) -> tuple[Prewarm, ...]:
        """The producers to prewarm since the last call."""
        waiting, self._waiting = self._waiting, []
        return tuple(waiting)

    def _remember(self, producer: Prewarm, now_s: float) -> None:
        self.forget(producer)
        self._named_s[producer] = now_s
        if len(self._named_s) > MAX_NAMED:
            del self._named_s[next(iter(self._named_s))]
