"""Waiting requests that vLLM skips: of those that it must not admit yet, all but the first few.

For a waiting request vLLM looks up its prompt's prefix before it asks the connector, in every step. With 512 requests
whose prefix of 256 blocks is cached, that took 205 ms a step; with all but 16 parked, 4 ms.

Two parts park, each with a `Parking` of its own, because each waits for something else: `prompt_queries.py` for
answers, `admission.py` for pinned blocks and failed loads. A request that has left one may enter the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.connector.scheduler_side.requests import EngineRequest
from kvferry.connector.vllm.requests import can_park, park, unpark

MAX_LOOKED_AT = 16
"""Most requests that wait for the same thing and that vLLM looks at in a step."""


class Parking:
    """The requests of one engine that wait for the same thing. Iterates over them."""

    def __init__(self) -> None:
        self._looked_at: set[EngineRequest] = set()
        self._parked: dict[EngineRequest, None] = {}  # the first that arrived is first

    def __contains__(self, entry: EngineRequest) -> bool:
        return entry in self._looked_at or entry in self._parked

    def __iter__(self) -> Iterator[EngineRequest]:
        yield from self._looked_at
        yield from self._parked

    def enter(self, entry: EngineRequest) -> None:
        """A request waits. It is parked if enough others do."""
        # One that cannot be parked counts as looked at: vLLM looks its prefix up in every step.
        has_room = len(self._looked_at) < MAX_LOOKED_AT
        if has_room or not can_park(entry.request):
            self._looked_at.add(entry)
            return
        park(entry.request)
        self._parked[entry] = None

    def leave(self, entry: EngineRequest) -> None:
        """A request waits no more, or has ended; the first parked one takes its place. No-op for other requests."""
        # Most requests never wait, and each comes here several times. Only what is beside looked-at ones is parked.
        if not self._looked_at:
            return
        self._looked_at.discard(entry)
        if entry in self._parked:
            del self._parked[entry]
            # Answered before its turn to be looked at: vLLM can admit it in the next step.
            unpark(entry.request)
        # The first that arrived: nobody waits longer than it must because others arrived later.
        while self._parked and len(self._looked_at) < MAX_LOOKED_AT:
            first = next(iter(self._parked))
            del self._parked[first]
            self._looked_at.add(first)
            unpark(first.request)
