"""Failed loads whose blocks may still be written: kept, and looked at, until nothing of them can be."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.worker.load import Load


class Quarantine:
    """Used on the transfer thread."""

    def __init__(self) -> None:
        self._since_s: dict[Load, float] = {}  # the oldest is first

    def __len__(self) -> int:
        return len(self._since_s)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._since_s)

    def add(self, load: Load, now_s: float) -> None:
        """Something may still write into the blocks of a load that has failed."""
        self._since_s[load] = now_s

    def requests(self) -> frozenset[str]:
        """Whose blocks must not be used."""
        return frozenset(load.order.request_id for load in self._since_s)

    def look(self) -> list[Load]:
        """Let go of those whose blocks are safe.

        Returns:
            These.
        """
        over = [load for load in self._since_s if load.settle()]
        for load in over:
            del self._since_s[load]
        return over

    def oldest_s(self, now_s: float) -> float:
        """Seconds that the oldest of them has been here; 0 when there is none."""
        return now_s - next(iter(self._since_s.values())) if self._since_s else 0.0
