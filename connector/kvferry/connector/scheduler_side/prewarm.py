"""The producers in `prewarm_peers`, passed to the engine's next step when they answer.

The prewarmer starts at the engine loop's first poll: before that, the engine can neither be woken nor step. A producer
that has answered waits for the next step; an idle engine is woken for it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from kvferry.connector.config_values import address_of
from kvferry.connector.vllm_internals import EngineLoop
from kvferry.protocol.orders import Prewarm
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.scheduler.side_channel.prewarmer import PeerPrewarmer


class KnownProducers:
    """The prewarmed producers of one engine. Starts no thread if the list is empty.

    Args:
        addresses: as in the configuration.
        engine_id: this engine's id.
        timeout_s: timeout of each attempt to reach one of them.
        secrets: secrets of the side channel.
    """

    def __init__(self, addresses: Sequence[str], engine_id: str, timeout_s: float, secrets: Secrets) -> None:
        self._found: collections.deque[Prewarm] = collections.deque()
        self._loop = EngineLoop()
        self._is_started = False
        self._search: PeerPrewarmer | None = None
        if addresses:
            self._search = PeerPrewarmer(map(address_of, addresses), engine_id, self._on_producer, timeout_s, secrets)

    def poll(self) -> bool:
        """Called by the engine's loop. Returns whether a producer waits for a step."""
        if self._search is not None and not self._is_started:
            self._is_started = True
            self._search.start()
        return bool(self._found)

    def take(self) -> list[Prewarm]:
        """The producers that have answered since the last call."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        """Stop the prewarmer. Idempotent."""
        if self._search is not None:
            self._search.close()

    def _on_producer(self, producer: Prewarm) -> None:
        """Called on the prewarmer's thread."""
        self._found.append(producer)
        self._loop.wake()
