"""Statistics of a step, as an engine's scheduler makes them."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.connector.metrics.stats import FerryStats
from kvferry.link.counters import CounterKey


def step_stats(
    counts: Mapping[CounterKey, float],
    samples: Mapping[str, list[float]],
    gauges: Mapping[str, float],
) -> FerryStats:
    """The statistics of one step."""
    counters: dict[str, dict[str, float]] = {}
    for (name, label), amount in counts.items():
        counters.setdefault(name, {})[label] = amount
    data = {"counters": counters, "samples": dict(samples), "gauges": dict(gauges)}
    return FerryStats(data=data)
