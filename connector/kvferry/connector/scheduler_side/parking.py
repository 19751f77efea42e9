"""Waiting requests that vLLM skips: of those that it must not admit yet, all but the first few.

For a waiting request vLLM looks up its prompt's prefix before it asks the connector, in every step. With 512 requests
whose prefix of 256 blocks is cached, that took 205 ms a step; with all but 16 parked, 4 ms.

Two parts park, each with a `Parking` of its own, because each waits for something else: `prompt_queries.py` for
answers, `admission.py` for pinned blocks and failed loads. A request that has left one may enter the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.connector.vllm.requests import can_park, park, unpark

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_ASKED = 16
"""Most requests that wait for the same thing and that vLLM looks at in a step."""


class Parking:
    """The requests of one engine that wait for the same thing."""

    def __init__(self) -> None:
        self._looked_at: set[str] = set()
        self._parked: dict[str, Request] = {}  # the first that arrived is first

    def enter(self, request: Request) -> None:
        """A request waits. It is parked if enough others do."""
        # One that cannot be parked counts as looked at: vLLM looks its prefix up in every step.
        has_room = len(self._looked_at) < MAX_ASKED
        if has_room or not can_park(request):
            self._looked_at.add(request.request_id)
            return
        park(request)
        self._parked[request.request_id] = request

    def leave(self, request_id: str) -> None:
        """A request waits no more, or has ended; the first parked one takes its place. No-op for other requests."""
        self._looked_at.discard(request_id)
        request = self._parked.pop(request_id, None)
        if request is not None:
            # Answered before its turn to be looked at: vLLM can admit it in the next step.
            unpark(request)
        # The first that arrived: nobody waits longer than it must because others arrived later.
        while self._parked and len(self._looked_at) < MAX_ASKED:
            first_id = next(iter(self._parked))
            first = self._parked.pop(first_id)
            self._looked_at.add(first_id)
            unpark(first)
