"""Waiting requests that vLLM skips: of those that it must not admit yet, all but the first few.

For a waiting request vLLM looks up its prompt's prefix before it asks the connector, in every step. With 512 requests
whose prefix of 256 blocks is cached, that took 205 ms a step; with all but 16 parked, 4 ms.

No connector can have a request skipped. But vLLM skips one whose grammar is not compiled yet, before the lookup, and so
one without a grammar for as long as it has that status. A request that ends is removed from the queue in any status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.connector.vllm.requests import can_park, park, unpark

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_ASKED = 16
"""Most requests that wait for the same thing (answers; pinned blocks) and that vLLM looks at in a step."""


class Parking:
    """The requests of one engine that wait for the same thing."""

    def __init__(self) -> None:
        self._looked_at: set[str] = set()
        self._parked: dict[str, Request] = {}  # the first that arrived is first

    def enter(self, request: Request) -> None:
        """A request waits. It is parked if enough others do, unless it waits for a grammar as well."""
        if len(self._looked_at) < MAX_ASKED or not can_park(request):
            self._looked_at.add(request.request_id)
        else:
            park(request)
            self._parked[request.request_id] = request

    def leave(self, request_id: str) -> None:
        """A request waits no more, or has ended; the first parked one takes its place. No-op for other requests."""
        self._looked_at.discard(request_id)
        leaving = [self._parked.pop(request_id)] if request_id in self._parked else []
        while self._parked and len(self._looked_at) < MAX_ASKED:
            first = self._parked.pop(next(iter(self._parked)))
            self._looked_at.add(first.request_id)
            leaving.append(first)
        for request in leaving:
            unpark(request)
