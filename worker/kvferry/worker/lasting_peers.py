"""Peers that the configuration names: they are met before a load needs them, and again when they were lost."""

from __future__ import annotations

from collections.abc import Container

from kvferry.worker.peer import PeerKey

SEEK_S = 0.5
"""How often it is looked whether they are to be met, while some are not known."""


class LastingPeers:
    """One life for each address; which of them may be met now is not decided here."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, int], PeerKey] = {}
        self._seek_s = 0.0

    def __contains__(self, key: PeerKey) -> bool:
        return self._keys.get((key.host, key.port)) == key

    def add(self, key: PeerKey) -> None:
        """This life is at its address now; whatever was there before is over."""
        self._keys[key.host, key.port] = key
        self._seek_s = 0.0

    def drop(self, key: PeerKey) -> None:
        """There is no use in meeting it."""
        if key in self:
            del self._keys[key.host, key.port]

    def next_s(self, known: Container[PeerKey]) -> float | None:
        """When to look again; None while all are known."""
        return self._seek_s if any(key not in known for key in self._keys.values()) else None

    def seek(self, now_s: float) -> tuple[PeerKey, ...]:
        """All of them when it is time to look, otherwise nobody."""
        if not self._keys or now_s < self._seek_s:
            return ()
        self._seek_s = now_s + SEEK_S
        return tuple(self._keys.values())
