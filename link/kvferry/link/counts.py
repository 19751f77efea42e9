"""Where the side channel counts."""

from __future__ import annotations

from typing import Protocol


class Counts(Protocol):
    """An engine's counters (`scheduler/counters.py`); counting is thread-safe."""

    def add(self, metric: str, label: str = "", amount: int = 1) -> None:
        """Count `amount` more of `metric`."""
