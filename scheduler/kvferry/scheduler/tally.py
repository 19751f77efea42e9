"""Counters that threads add to and the engine's metrics drain."""

from __future__ import annotations

import threading
from collections import Counter

CounterKey = tuple[str, str]
"""Metric and label value; the label is empty where the metric has none."""


class Tally:
    """A thread-safe bag of counters.

    Each addition is kept until `take` drains it; `total` keeps everything for ever, for tests and debug output.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_taken: Counter[CounterKey] = Counter()
        self._total: Counter[CounterKey] = Counter()

    def add(self, metric: str, label: str = "", amount: int = 1) -> None:
        """Count `amount` more of `metric`."""
        with self._lock:
            self._since_taken[metric, label] += amount
            self._total[metric, label] += amount

    def total(self, metric: str, label: str = "") -> int:
        """Everything counted so far."""
        with self._lock:
            return self._total[metric, label]

    def take(self) -> dict[CounterKey, int]:
        """What was counted since the last call."""
        with self._lock:
            taken, self._since_taken = self._since_taken, Counter()
        return dict(taken)
