"""Plans of whole engines, and as text; assignments are in test_assignment, refusals in test_refusals."""

from __future__ import annotations

import pytest

from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_engine, plan_transfer
from kvferry.plan.transfer_plan import Placing, TransferPlan
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.geometry import PagedTensor, Place, Range
from kvferry.protocol.handshake import CacheGroup, EngineDescription
from tests.plan.engines import sharded
from tests.plan.samples import engine, tensor

OURS = engine(engine_id="D")


def test_the_plan_of_a_worker_is_its_part_of_the_engines() -> None:
    consumer, producer = sharded("D", tp=3, heads=6), sharded(tp=2, heads=6)
    assert [plan_transfer(consumer, index, producer) for index in range(3)] == list(plan_engine(consumer, producer))


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


NO_POOL = Costs(staged_run_bytes=0)


LINES: dict[str, tuple[EngineDescription, EngineDescription, int, Costs, str]] = {
    "routes that only release": (
        *(sharded("D", heads=2), sharded(tp=4, heads=2), 0, NO_POOL),
        "tp0 reads tp0, tp2: each 4 tensors, heads 0…1, 32 B/token, direct, runs of 64 B, units of 4 tokens, "
        "2 descriptors a unit; releases tp1, tp3",
    ),
    "pipeline stages": (
        *(sharded("D", stages=(1, 1)), sharded(stages=(1, 1)), 1, NO_POOL),
        "tp0/pp1 reads tp0/pp1: 2 tensors, heads 0…3, 64 B/token, direct, runs of 256 B, units of 4 tokens, "
        "1 descriptors a unit",
    ),
    "hybrid": (
        *(sharded("D", layers=1, model="hybrid"), sharded(layers=1, model="hybrid"), 0, NO_POOL),
        "tp0 reads tp0: 6 tensors, heads 0…3, 64 B/token, 320 B/request, direct, runs of 256…320 B, "
        "units of 4 tokens, 2 descriptors a unit",
    ),
    "blocks of two sizes": (
        *(sharded("D", block_tokens=6), sharded(), 0, NO_POOL),
        "tp0 reads tp0: 4 tensors, heads 0…3, 128 B/token, direct, runs of 32 B, units of 2 tokens, "
        "8 descriptors a unit",
    ),
    "staged": (
        *(sharded("D", order="NHD"), sharded(), 0, Costs(relayout_gb_s=1e9)),
        "tp0 reads tp0: 4 tensors, heads 0…3, 128 B/token, staged, runs of 16 B read in runs of 256 B, "
        "units of 4 tokens, 2 descriptors a unit",
    ),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_plan_is_described_in_one_line(kind: str) -> None:
    consumer, producer, worker, costs, expected = LINES[kind]
    assert plan_engine(consumer, producer, costs)[worker].describe() == f"plan producer=P {expected}"


def test_a_worker_that_needs_nothing_says_so() -> None:
    assert TransferPlan("P", Place(tp=1), 1, ()).describe() == "plan producer=P tp1 needs nothing"


def test_a_routes_bundles_are_placed_as_their_slices_are() -> None:
    """Attention in long runs beside states in short ones, behind longer ones of the producer."""
    consumer, producer = sharded("D", tp=2, model="hybrid"), sharded(model="hybrid")
    (plan, _) = plan_engine(consumer, producer, Costs(direct_min_bytes=65))
    for route in plan.routes:
        for bundle in route.bundles:
            placings = {route.slices[member].placing for place in bundle.members for member in place}
            assert placings == {route.placing_of(bundle)}
            assert bundle.run_bytes < 65 or placings == {Placing.DIRECT}
