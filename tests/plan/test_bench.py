"""bench/plan.py at its real size, against the limits that it publishes, and its whole run in small."""

from __future__ import annotations

import pytest
from bench.cases import Case
from bench.plan import measure_ours, run
from bench.plan_report import MAX_PLAN_MB, MAX_PLAN_MS, MAX_REQUEST_MS, results_of

BLOCKS = 100_000


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(8, 4), (4, 8)])
def test_plans_tables_and_requests_stay_within_their_limits(producer_tp: int, consumer_tp: int, layout: str) -> None:
    """Best of five, in processor time; the other runs on this machine decide about the rest."""
    found = measure_ours(Case(producer_tp, consumer_tp, layout, BLOCKS), repeats=5)
    assert found.plan_and_tables_ms < MAX_PLAN_MS
    assert found.peak_mb < MAX_PLAN_MB
    assert found.request_ms < MAX_REQUEST_MS
    assert found.placing == ("direct" if layout == "HND" else "staged")


def test_a_table_counts_a_descriptor_for_every_layer_and_block_but_has_a_row_for_every_layer() -> None:
    found = measure_ours(Case(4, 8, "HND", BLOCKS), repeats=1)
    assert (found.rows, found.descriptors) == (80, 80 * BLOCKS)
    assert found.request_descriptors == 80 * 512


def test_the_whole_run_prints_a_line_for_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(blocks=1000, published_blocks=50, repeats=1, with_nixl=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if " TP " in line]
    assert len(lines) == len(found) == 4
    assert [line.count("scaled from 50 blocks") for line in lines] == [1, 1, 0, 0]
    assert ["refuses tokens outermost" in line for line in lines] == [False, False, True, True]


def test_what_is_published_has_the_worst_case_beside_each_limit() -> None:
    results = results_of(run(blocks=1000, published_blocks=50, repeats=1, with_nixl=False), quick=False)
    slowest = max(case["ours"]["plan_and_tables_ms"] for case in results.raw["cases"])
    assert [(target.limit, target.unit) for target in results.targets] == [(50.0, "ms"), (16.0, "MB"), (1.0, "ms")]
    assert results.targets[0].measured == slowest
    assert [len(table.rows) for table in results.tables] == [4]
    assert [series.y[2:] == [None, None] for series in results.charts[0].series] == [False, True]
