"""Plans of whole engines; assignments are in test_assignment, refusals in test_refusals."""

from __future__ import annotations

import pytest

from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_engine, plan_transfer
from kvferry.plan.transfer_plan import Placing
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import PagedTensor, Place, Range
from kvferry.protocol.handshake import CacheGroup
from tests.plan.engines import sharded
from tests.plan.samples import FACTS, engine, other, tensor

OURS = engine(engine_id="D")


def test_equal_engines_are_planned_tensor_by_tensor() -> None:
    layers = [tensor(layer=f"layers.{n}", base=4096 * (n + 1)) for n in range(3)]
    there = [other(layer, base=layer.base + (1 << 30), blocks=3) for layer in reversed(layers)]
    plan = plan_transfer(engine(*layers), 0, engine(*there))
    (route,) = plan.routes
    assert (plan.producer, plan.worker, plan.place, route.worker, route.expected) == ("P", 0, Place(), 0, 1)
    assert [(item.local, item.remote) for item in route.slices] == list(zip(layers, reversed(there), strict=True))
    for item in route.slices:
        assert (item.heads, item.placing, item.run_bytes, item.unit_runs) == (Range(0, 2), Placing.DIRECT, 64, 1.0)
        assert item.token_bytes == 16


def test_the_plan_of_a_worker_is_its_part_of_the_engines() -> None:
    consumer, producer = sharded("D", tp=3, heads=6), sharded(tp=2, heads=6)
    assert [plan_transfer(consumer, index, producer) for index in range(3)] == list(plan_engine(consumer, producer))


def test_sizes_that_do_not_divide_read_parts_of_two_workers() -> None:
    """6 heads on TP 2 feed TP 3: the second reads head 2 of the first producer and head 3 of the second."""
    plan = plan_transfer(sharded("D", tp=3, heads=6), 1, sharded(tp=2, heads=6))
    heads = [{item.heads for item in route.slices} for route in plan.routes]
    assert heads == [{Range(2, 3)}, {Range(3, 4)}]


def test_scheduler_blocks_may_differ_where_kernel_blocks_are_equal() -> None:
    producer = engine(groups=(CacheGroup(policy="full", block_tokens=16),))
    assert plan_transfer(OURS, 0, producer).routes[0].slices[0].tokens.unit_tokens == 4


def test_every_group_has_its_own_units_and_readers() -> None:
    """Two KV heads on four ranks: two of them are read for attention, all four for their parts of the states."""
    (plan,) = plan_engine(sharded("D", heads=2, model="hybrid"), sharded(tp=4, heads=2, model="hybrid"))
    groups = [sorted({item.tokens.group for item in route.slices}) for route in plan.routes]
    assert groups == [[0, 1], [1], [0, 1], [1]]
    units = {(item.tokens.group, item.tokens.unit_tokens) for route in plan.routes for item in route.slices}
    assert units == {(0, 4), (1, 0)}


def test_token_maps_of_a_group_are_one_value() -> None:
    """Pairing is done once per map, so there must not be one per tensor."""
    plan = plan_transfer(sharded("D", layers=8), 0, sharded(layers=8))
    assert len({item.tokens for route in plan.routes for item in route.slices}) == 1


def short_runs() -> tuple[PagedTensor, PagedTensor]:
    """One head of 64 B a token among eight there, tokens outermost; runs of 64 B here, of 8 KiB there."""
    usual = {"block_tokens": 16, "heads": Range(0, 8), "cell_bytes": 64, "block_stride": 8192}
    return tensor(**usual, head_stride=1024, tile_stride=64), tensor(**usual, head_stride=64, tile_stride=512)


@pytest.mark.parametrize("costs", [Costs(staged_run_bytes=0), Costs(direct_min_bytes=64), Costs(relayout_gb_s=1e-3)])
def test_the_choice_between_direct_and_staged_is_the_costs_alone(costs: Costs) -> None:
    here, there = short_runs()
    groups = (CacheGroup(policy="full", block_tokens=16),)
    pair = engine(here, groups=groups), 0, engine(there, groups=groups)
    (route,) = plan_transfer(*pair).routes
    (item,) = route.slices
    assert item.placing is Placing.STAGED
    assert item.reason == "runs of 64 B, but of 8192 B on the producer"
    assert route.sources
    (route,) = plan_transfer(*pair, costs).routes
    (item,) = route.slices
    assert item.placing is Placing.DIRECT
    assert item.reason.startswith("runs of 64 B, and ")
    assert route.sources == ()


def test_a_description_that_contradicts_itself_is_an_invalid_message() -> None:
    with pytest.raises(InvalidMessage):
        plan_transfer(OURS, 0, engine(tensor(group=3)))


def test_the_models_name_and_its_longest_prompt_may_differ() -> None:
    """Weights are compared, not names: a copy in another directory is the same model."""
    assert plan_transfer(OURS, 0, engine(facts=other(FACTS, model="elsewhere", max_model_tokens=9))).routes
