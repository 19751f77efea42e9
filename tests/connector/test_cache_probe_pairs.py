"""Pairs of engines that differ, when the probe has recognised the rows of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.connector.layout.discovery import discover, groups_of
from kvferry.connector.layout.probe import block_layouts_of
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.geometry import Place, Topology
from tests.connector.caches import ALONE
from tests.connector.written_caches import TOKENS, WIDTH, Rows, TurnedByHead, Written, layer_of, spec_of
from tests.plan.samples import engine, worker


def engine_of(tp: int, layout: str, block_size: int = TOKENS, *, backend: type[Rows] = Rows) -> Any:
    """An engine of 4 heads whose backend was probed."""
    workers = []
    for rank in range(tp):
        cache = Written(layer_of(backend()), spec_of(num_kv_heads=4 // tp, block_size=block_size), layout)
        block_layouts = block_layouts_of(
            dict.fromkeys(cache.views, cache.layer), cache.views, cache.config, cache.dtype
        )
        sharding = replace(ALONE, total_heads=4, rank=rank, size=tp)
        workers.append(worker(discover(cache.views, cache.config, block_layouts, sharding).tensors, Place(tp=rank)))
    return engine(workers=workers, topology=Topology(tp=tp), groups=groups_of(cache.config))


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ((1, "LBHNC"), (2, "LBHNC")),
        ((2, "LBHNC"), (1, "LBHNC")),
        ((1, "LBNHC"), (1, "LBHNC")),
        ((1, "LBHNC"), (4, "LBNHC")),
        ((2, "BLHNC"), (1, "LBNHC")),
        ((1, "LBHNC", 2 * TOKENS), (1, "LBNHC")),
    ],
)
def test_engines_that_differ_in_ranks_layout_or_block_are_paired_if_both_have_rows(
    producer: tuple[Any, ...], consumer: tuple[Any, ...]
) -> None:
    plans = plan_engine(engine_of(*consumer), engine_of(*producer))
    for plan in plans:
        read = [(item.local.kind, len(item.heads)) for route in plan.routes for item in route.slices]
        for kind in ("k", "v"):
            assert sum(heads for one, heads in read if one == kind) == 2 * 4 // consumer[0], "two layers"
    with pytest.raises(PlanRefused):
        plan_engine(*(engine_of(*side, backend=TurnedByHead) for side in (consumer, producer)))


@pytest.mark.parametrize("tp", [1, 2])
def test_packed_rows_of_equal_shards_are_still_one_run_a_block(tp: int) -> None:
    """K and V are two tensors now; the planner reads both, of all heads and tokens, at once."""
    for plan in plan_engine(engine_of(tp, "LBHNC"), engine_of(tp, "LBHNC")):
        (route,) = plan.routes
        assert {run.run_bytes for run in route.bundles} == {4 // tp * TOKENS * 2 * WIDTH * 2}
