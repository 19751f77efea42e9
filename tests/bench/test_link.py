"""The benchmark of the side channel: every exchange with every peer is counted, and what it takes is told."""

from __future__ import annotations

import pytest
from bench.link import Exchanges, run


def test_a_row_has_the_median_the_99th_percentile_and_the_processor_time_of_each() -> (
    None
):
    measured = Exchanges("query", 4, took_s=[number / 1e3 for number in range(1, 101)])
    measured.processor_s = 0.02
    assert measured.row() == (
        4,
        100,
        pytest.approx(50.5),
        99.0,
        pytest.approx(200.0),
    )


@pytest.mark.slow
def test_each_exchange_is_measured_with_each_number_of_peers_and_in_each_round() -> (
    None
):
    rounds, peers = 2, (1, 3)
    results = run(peers, rounds, quick=True)
    for table, kind in zip(
        results.tables, ("First contact", "Renewal", "Query"), strict=True
    ):
        assert table.title == kind
        assert [row[:2] for row in table.rows] == [
            (count, rounds * count) for count in peers
        ]
        for _, _, p50_ms, p99_ms, processor_us in table.rows:
            assert isinstance(p50_ms, float)
            assert isinstance(p99_ms, float)
            assert 0 < p50_ms <= p99_ms
            assert isinstance(processor_us, float)
            assert processor_us > 0
