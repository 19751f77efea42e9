"""Leases of other engines that this one is done with: what a replay of old params is known by.

A lease serves one request once. Whoever comes with its params afterwards is computed here at once, without asking the
producer, whose fence would refuse it.
"""

from __future__ import annotations

from collections import deque

LeaseKey = tuple[str, int, str]
"""Boot, slot and epoch: a lease among all leases of all engines."""

MAX_ENDED_LEASES = 1 << 16
"""Most that are remembered: at most 13 MB. Of older ones a replay is tried again, and fails at the producer's fence."""


class EndedLeases:
    """The last `limit` leases that ended, the longest ended first to be forgotten."""

    def __init__(self, limit: int = MAX_ENDED_LEASES) -> None:
        self._limit = limit
        self._found: set[bytes] = set()
        self._order: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: LeaseKey) -> bool:
        return _packed(key) in self._found

    def add(self, key: LeaseKey) -> None:
        """Remember a lease; one that is remembered already does not become younger."""
        packed = _packed(key)
        if packed in self._found:
            return
        self._found.add(packed)
        self._order.append(packed)
        if len(self._order) > self._limit:
            self._found.remove(self._order.popleft())


def _packed(key: LeaseKey) -> bytes:
    """27 bytes: 16 of the boot, 3 of the slot, 8 of the epoch. `key` is of validated params."""
    boot, slot, epoch = key
    return bytes.fromhex(boot) + slot.to_bytes(3, "big") + int(epoch, 16).to_bytes(8, "big")
