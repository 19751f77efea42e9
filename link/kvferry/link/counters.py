"""Counters and samples of one process, for its metrics."""

from __future__ import annotations

import threading

CounterKey = tuple[str, str]
"""Metric and label value; the label is empty where the metric has none."""


class Counters:
    """Thread-safe counters and samples.

    `take` returns what was added since the last call and resets it; `total` is never reset, for tests and debug output.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_taken: dict[CounterKey, int] = {}
        self._total: dict[CounterKey, int] = {}
        self._samples: dict[str, list[float]] = {}

    def add(self, metric: str, label: str = "", amount: int = 1) -> None:
        """Count `amount` more of `metric`."""
        key = (metric, label)
        with self._lock:
            self._since_taken[key] = self._since_taken.get(key, 0) + amount
            self._total[key] = self._total.get(key, 0) + amount

    def total(self, metric: str, label: str = "") -> int:
        """The count since the start."""
        with self._lock:
            return self._total.get((metric, label), 0)

    def take(self) -> dict[CounterKey, int]:
        """The counts since the last call."""
        # Without the lock: what another thread counts at this moment is taken by the next call.
        if not self._since_taken:
            return {}
        with self._lock:
            taken = self._since_taken
            self._since_taken = {}
        return taken

    def sample(self, metric: str, value: float) -> None:
        """Add a measurement of `metric`."""
        with self._lock:
            self._samples.setdefault(metric, []).append(value)

    def take_samples(self) -> dict[str, list[float]]:
        """The measurements since the last call, by metric."""
        if not self._samples:
            return {}
        with self._lock:
            taken = self._samples
            self._samples = {}
        return taken
