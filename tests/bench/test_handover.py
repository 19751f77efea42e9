"""bench/handover.py: the shapes that it moves, and what it says of them; the run itself takes two processes."""

from __future__ import annotations

import pytest
from bench.handover import BARE, COPY, ENGINES, HANDOVER, TOKEN_BYTES, Measured, results_of, scenario_of


@pytest.mark.parametrize("engines", ENGINES)
def test_a_token_of_llama_70b_has_80_layers_of_k_and_v_with_8_heads_of_128_bfloat16(engines: str) -> None:
    scenario = scenario_of(engines, most_tokens=1024, pool_bytes=2048 * TOKEN_BYTES)
    assert TOKEN_BYTES == 80 * 2 * 8 * 128 * 2
    assert scenario.tokens(1024 * TOKEN_BYTES) == 1024
    for side in (scenario.producer, scenario.consumer):
        assert len(scenario.request_blocks(side, 1024 * TOKEN_BYTES, seed=1)) == 1024 // side.block_tokens


def test_what_is_staged_has_no_bare_loop_beside_it_and_throughput_is_of_the_median() -> None:
    direct, staged, third = ENGINES
    found = [
        Measured(direct, 1000, {HANDOVER: [300.0, 100.0, 200.0], BARE: [50.0], COPY: [40.0]}, 10, 0),
        Measured(staged, 1000, {HANDOVER: [400.0], COPY: [40.0]}, 10, 1000 * TOKEN_BYTES),
        Measured(third, 1000, {HANDOVER: [500.0], COPY: [40.0]}, 10, 1000 * TOKEN_BYTES),
    ]
    results = results_of(found, "cpu", "pages", quick=False)
    assert results.tables[0].rows[0][5:10] == [
        3,
        200.0,
        "100 … 300",
        TOKEN_BYTES / 200.0 / 1e3,
        TOKEN_BYTES / 50.0 / 1e3,
    ]
    assert results.tables[0].rows[1][9] is None
    names = [series.name for series in results.charts[0].series]
    assert names == [*(f"kvferry, {name}" for name in ENGINES), BARE, COPY]
