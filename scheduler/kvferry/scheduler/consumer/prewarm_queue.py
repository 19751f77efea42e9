"""Which producers the workers are told to meet, before the first load from them is scheduled.

What a worker needs for a first contact (a description, a plan, a first read) goes on while the request waits in the
queue. A worker forgets a producer that is lost or that makes room for others, and says nothing of it here: so a
producer is named again when `AGAIN_S` have passed, or a load from it has failed, and a request names it once more.
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.orders import Meet

AGAIN_S = 10.0
"""Naming a producer that is known costs a worker a look into a table."""
MAX_NAMED = 4096
"""Most that are remembered, the one named last the longest; clients choose what params name."""
MAX_WAITING = 64
"""Most that one step's orders name. Loads of the others begin with the first contact, as if nobody had been named."""


class Meetings:
    """Used by the ledger. `now_s` is of any clock that only goes forward."""

    def __init__(self) -> None:
        self._named_s: dict[Meet, float] = {}  # the one named last is last
        self._waiting: list[Meet] = []

    def __len__(self) -> int:
        """Producers that are remembered."""
        return len(self._named_s)

    def expect(self, producer: Meet, now_s: float) -> None:
        """A request has come that will be read from this producer."""
        named_s = self._named_s.get(producer)
        if len(self._waiting) >= MAX_WAITING or (named_s is not None and now_s < named_s + AGAIN_S):
            return
        self._remember(producer, now_s)
        self._waiting.append(producer)

    def introduce(self, producer: Meet, now_s: float) -> None:
        """A life of a producer that the configuration names was found; requests need not name it for a while."""
        self._remember(msgspec.structs.replace(producer, is_lasting=False), now_s)
        self._waiting.append(producer)

    def forget(self, producer: Meet) -> None:
        """The workers may have lost it: the next request names it again."""
        self._named_s.pop(producer, None)

    def take(self) -> tuple[Meet, ...]:
        """Whom to meet since the last call."""
        waiting, self._waiting = self._waiting, []
        return tuple(waiting)

    def _remember(self, producer: Meet, now_s: float) -> None:
        self.forget(producer)
        self._named_s[producer] = now_s
        if len(self._named_s) > MAX_NAMED:
            del self._named_s[next(iter(self._named_s))]
