"""Peers that were removed while they lived, and are still connected.

UCX closes a connection when both ends do, and NIXL closes only the end that asked for it. So a peer that is met, left
and met again would leave a connection in both processes each time, for as long as both live (over shared memory three
attached segments, for good). NIXL is therefore told to forget a living peer only when there are too many.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_PARTED = 256
"""Each costs about half a megabyte while it lives, forgotten or not."""


class PartedPeers:
    """By agent's name.

    Args:
        forget: tells NIXL.
    """

    def __init__(self, forget: Callable[[str], None], most: int = MOST_PARTED) -> None:
        self._forget = forget
        self._most = most
        self._metadata: dict[str, bytes] = {}  # the one left first is first

    def add(self, name: str, metadata: bytes) -> None:
        """Nobody uses this peer any more."""
        self._metadata[name] = metadata
        if len(self._metadata) > self._most:
            self._drop(next(iter(self._metadata)))

    def take(self, name: str, metadata: bytes) -> bool:
        """Whether NIXL still knows a peer by this very metadata; if by other, it forgets it."""
        if self._metadata.get(name) == metadata:
            del self._metadata[name]
            return True
        if name in self._metadata:
            self._drop(name)
        return False

    def clear(self) -> None:
        """Forget all of them."""
        for name in list(self._metadata):
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._metadata[name]
        self._forget(name)
