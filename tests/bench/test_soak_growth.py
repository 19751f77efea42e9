"""Limits of what a soak adds with every request: a leak fails it, and what goes up and down does not."""

from __future__ import annotations

from typing import Any

import pytest
from bench.soak_counts import Gauges, Sample
from bench.soak_report import FEWEST_FOR_A_SLOPE, MOST_ADDED, grown


def figures(requests: int, **added: float) -> dict[str, Any]:
    """Of a soak; gauges without a number do not grow."""
    return {
        "requests": requests,
        "gauges": {name: {"per_1000_requests": added.get(name, 0.0)} for name in MOST_ADDED},
    }


@pytest.mark.parametrize("name", MOST_ADDED)
def test_each_gauge_that_grows_by_more_than_its_limit_is_named(name: str) -> None:
    most = MOST_ADDED[name]
    assert grown(figures(FEWEST_FOR_A_SLOPE, **{name: most})) == []
    (said,) = grown(figures(FEWEST_FOR_A_SLOPE, **{name: 1.1 * most}))
    assert f"at most {most:g}" in said
    assert grown(figures(FEWEST_FOR_A_SLOPE - 1, **{name: 1.1 * most})) == []


def test_the_slope_is_that_of_a_leak_beneath_what_goes_up_and_down() -> None:
    samples = [
        Sample(
            at / 10,
            at,
            100.0,
            100.0 + 5 * (at // 100 % 2),
            10 * at + 5000 * (at // 100 % 2),
            50,
            10,
        )
        for at in range(0, 5000, 50)
    ]
    gauges = Gauges(samples=samples)
    assert gauges.slope("objects") == pytest.approx(10_000, rel=0.1)
    assert abs(gauges.slope("own_mb")) < MOST_ADDED["own_mb"] / 4
    assert gauges.slope("fds") == 0
