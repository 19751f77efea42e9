"""Leases of other engines that this engine has finished with, to recognise a replay of old params.

A lease serves one request once. A later request with the same params is computed here at once, without a read that the
producer's fence would refuse.
"""

from __future__ import annotations

from collections import deque

LeaseKey = tuple[str, int, str]
"""Boot, slot and epoch: a lease among all leases of all engines."""

MAX_ENDED_LEASES = 1 << 16
"""Most leases remembered: at most 13 MB. A replay of an older one is tried, and fails at the producer's fence."""


class EndedLeases:
    """The last `limit` leases that ended; the oldest is dropped first."""

    def __init__(self, limit: int = MAX_ENDED_LEASES) -> None:
        self._limit = limit
        self._found: set[bytes] = set()
        self._order: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: LeaseKey) -> bool:
        return _packed(key) in self._found

    def add(self, key: LeaseKey) -> None:
        """Remember a lease; adding it again does not change its age."""
        packed = _packed(key)
        if packed in self._found:
            return
        self._found.add(packed)
        self._order.append(packed)
        if len(self._order) > self._limit:
            self._found.remove(self._order.popleft())


def _packed(key: LeaseKey) -> bytes:
    """27 bytes: 16 of the boot, 3 of the slot, 8 of the epoch. `key` comes from validated params."""
    boot, slot, epoch = key
    return bytes.fromhex(boot) + slot.to_bytes(3, "big") + int(epoch, 16).to_bytes(8, "big")
