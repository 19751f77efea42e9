"""Plans as text, one line for every kind of model, and as immutable values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_engine, plan_transfer
from kvferry.plan.transfer_plan import Placing, TransferPlan
from kvferry.protocol.geometry import Place, Range
from kvferry.protocol.handshake import EngineDescription
from tests.plan.engines import sharded
from tests.plan.samples import engine, tensor

NO_POOL = Costs(staged_run_bytes=0)


LINES: dict[str, tuple[EngineDescription, EngineDescription, int, Costs, str]] = {
    "attention": (
        *(sharded("D"), sharded(), 0, NO_POOL),
        "tp0 reads tp0: 4 tensors, heads 0…3, 128 B/token, direct, runs of 256 B, units of 4 tokens, "
        "2 descriptors a unit",
    ),
    "routes that only release": (
        *(sharded("D", heads=2), sharded(tp=4, heads=2), 0, NO_POOL),
        "tp0 reads tp0: 4 tensors, head 0, 32 B/token, direct, runs of 64 B, units of 4 tokens, 2 descriptors a unit; "
        "reads tp2: 4 tensors, head 1, 32 B/token, direct, runs of 64 B, units of 4 tokens, 2 descriptors a unit; "
        "releases tp1; releases tp3",
    ),
    "MLA": (
        *(sharded("D", tp=2, model="mla"), sharded(tp=2, model="mla"), 1, NO_POOL),
        "tp1 reads tp1: 2 tensors, head 0, 48 B/token, direct, runs of 96 B, units of 4 tokens, 2 descriptors a unit",
    ),
    "pipeline stages": (
        *(sharded("D", stages=(1, 1)), sharded(stages=(1, 1)), 1, NO_POOL),
        "tp0/pp1 reads tp0/pp1: 2 tensors, heads 0…3, 64 B/token, direct, runs of 256 B, units of 4 tokens, "
        "1 descriptors a unit",
    ),
    "states, by request": (
        *(sharded("D", layers=1, model="state"), sharded(layers=1, model="state"), 0, NO_POOL),
        "tp0 reads tp0: 4 tensors, 0 B/token, 320 B/request, direct, runs of 320 B, 1 descriptors a unit",
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


def test_a_plan_cannot_be_changed() -> None:
    plan = plan_transfer(sharded("D"), 0, sharded())
    for value, field in ((plan, "routes"), (plan.routes[0], "slices"), (plan.routes[0].slices[0], "heads")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, ())
    assert hash(plan) == hash(plan_transfer(sharded("D"), 0, sharded()))


def test_heads_are_counted_over_the_model_here_and_there() -> None:
    here, there = tensor(heads=Range(4, 6)), tensor(heads=Range(2, 8))
    (route,) = plan_transfer(engine(here), 0, engine(there), NO_POOL).routes
    (item,) = route.slices
    assert item.heads == Range(4, 6)


def test_a_routes_bundles_are_placed_as_their_slices_are() -> None:
    """Attention in long runs beside states in short ones, behind longer ones of the producer."""
    consumer, producer = sharded("D", tp=2, model="hybrid"), sharded(model="hybrid")
    (plan, _) = plan_engine(consumer, producer, Costs(direct_min_bytes=65))
    for route in plan.routes:
        for bundle in route.bundles:
            placings = {route.slices[member].placing for place in bundle.members for member in place}
            assert placings == {route.placing_of(bundle)}
            assert bundle.run_bytes < 65 or placings == {Placing.DIRECT}
