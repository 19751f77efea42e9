"""The tables of `bench.step`: every row says of which scene it is."""

from __future__ import annotations

from typing import Any

from bench.step_report import HALVES, Shown, results_of
from bench.step_scenes import REQUESTS, SCENES


def seen() -> dict[str, Any]:
    """Figures as the process of one scene prints them."""
    times = {"p50": 1.0, "p99": 2.0, "max": 3.0}
    half = {"cpu": times, "wall": times, "singly": {"call": {"count": 1, **times}}}
    return {
        "halves": dict.fromkeys(HALVES, half),
        "always_the_same": times,
    }


def test_the_blocks_of_each_request_are_in_every_row_and_4000_are_measured_and_drawn() -> None:
    found = [Shown(sweep.name, scene, seen()) for sweep in SCENES for scene in sweep.scenes]
    results = results_of(found, 100, quick=False)
    (steps,) = (table for table in results.tables if table.title == "One handover a step")
    beside = steps.columns.index("half")
    assert [row[:beside] for row in steps.rows if row[0] == REQUESTS.name and row[beside] == HALVES[0]] == [
        (REQUESTS.name, 1, 0, 0, blocks) for blocks in (2, 32, 320, 1000, 4000)
    ]
    assert len({row[: beside + 1] for row in steps.rows}) == len(steps.rows) - 5 * _repeated(found)
    (chart,) = (chart for chart in results.charts if chart.x_label == "blocks of each request")
    assert all(series.x[-1] == 4000 for series in chart.series)


def _repeated(found: list[Shown]) -> int:
    return len(found) - len({(one.sweep, one.scene) for one in found})
