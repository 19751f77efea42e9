"""Plans of whole engines, and as text; assignments are in test_assignment, refusals in test_refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvferry.plan.cost import Costs
from kvferry.plan.engine_shape import EngineShape
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
    assert [plan_transfer(consumer, index, producer) for index in range(3)] == list(
        plan_engine(consumer, producer)
    )


def test_token_maps_of_a_group_are_one_value() -> None:
    """Pairing is done once per map, so there must not be one per tensor."""
    plan = plan_transfer(sharded("D", layers=8), 0, sharded(layers=8))
    assert len({item.tokens for route in plan.routes for item in route.slices}) == 1


def short_runs() -> tuple[PagedTensor, PagedTensor]:
    """One head of 64 B a token among eight there, tokens outermost; runs of 64 B here, of 8 KiB there."""
    usual = {
        "block_tokens": 16,
        "heads": Range(0, 8),
        "cell_bytes": 64,
        "block_stride": 8192,
    }
    return tensor(**usual, head_stride=1024, tile_stride=64), tensor(
        **usual, head_stride=64, tile_stride=512
    )


@pytest.mark.parametrize(
    "costs",
    [Costs(staged_run_bytes=0), Costs(direct_min_bytes=64), Costs(relayout_gb_s=1e-3)],
)
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
        "tp0 of [TP 1 · 2 layers · 2 heads · bfloat16 · full, blocks of 4 tokens] "
        "from [TP 4 · 2 layers · 2 heads · bfloat16 · full, blocks of 4 tokens]: "
        "reads tp0, tp2: each 4 tensors, heads 0…1 (1 of each rank, in order), 32 B/token, direct, runs of 64 B, "
        "units of 4 tokens, 2 descriptors a unit; releases tp1, tp3",
    ),
    "pipeline stages": (
        *(sharded("D", stages=(1, 1)), sharded(stages=(1, 1)), 1, NO_POOL),
        "tp0/pp1 of [TP 1 · PP 2 · 2 layers · 4 heads · bfloat16 · full, blocks of 4 tokens] "
        "from [TP 1 · PP 2 · 2 layers · 4 heads · bfloat16 · full, blocks of 4 tokens]: "
        "reads tp0/pp1: 2 tensors, heads 0…3, 64 B/token, direct, runs of 256 B, units of 4 tokens, "
        "1 descriptors a unit",
    ),
    "hybrid": (
        *(
            sharded("D", layers=1, model="hybrid"),
            sharded(layers=1, model="hybrid"),
            0,
            NO_POOL,
        ),
        "tp0 of [TP 1 · 2 layers · 4 heads · bfloat16/float32 · full, blocks of 4 tokens; state] "
        "from [TP 1 · 2 layers · 4 heads · bfloat16/float32 · full, blocks of 4 tokens; state]: "
        "reads tp0: 6 tensors, heads 0…3, 64 B/token, 320 B/request, direct, runs of 256…320 B, "
        "units of 4 tokens, 2 descriptors a unit",
    ),
    "blocks of two sizes": (
        *(sharded("D", block_tokens=6), sharded(), 0, NO_POOL),
        "tp0 of [TP 1 · 2 layers · 4 heads · bfloat16 · full, blocks of 6 tokens] "
        "from [TP 1 · 2 layers · 4 heads · bfloat16 · full, blocks of 4 tokens]: "
        "reads tp0: 4 tensors, heads 0…3, 128 B/token, direct, runs of 32 B, units of 2 tokens, "
        "8 descriptors a unit",
    ),
    "staged": (
        *(sharded("D", order="NHD"), sharded(), 0, Costs(relayout_gb_s=1e9)),
        "tp0 of [TP 1 · 2 layers · 4 heads · bfloat16 · full, blocks of 4 tokens] "
        "from [TP 1 · 2 layers · 4 heads · bfloat16 · full, blocks of 4 tokens]: "
        "reads tp0: 4 tensors, heads 0…3, 128 B/token, staged (runs of 16 B, but of 256 B on the producer), "
        "runs of 16 B read in runs of 256 B, "
        "units of 4 tokens, 2 descriptors a unit",
    ),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_plan_is_described_in_one_line(kind: str) -> None:
    consumer, producer, worker, costs, expected = LINES[kind]
    assert (
        plan_engine(consumer, producer, costs)[worker].describe()
        == f"plan producer=P {expected}"
    )


def test_a_worker_that_needs_nothing_says_so() -> None:
    shape = EngineShape.from_engine(sharded(tp=2))
    plan = TransferPlan("P", Place(tp=1), 1, (), (shape, shape))
    assert (
        plan.describe()
        == f"plan producer=P tp1 of [{shape}] from [{shape}]: needs nothing"
    )


def test_a_read_of_states_alone_has_no_bytes_per_token() -> None:
    (plan,) = plan_engine(sharded("D", model="state"), sharded(model="state"))
    assert "B/request" in plan.describe()
    assert "B/token" not in plan.describe()


SHUFFLED = (2, 0, 5, 1, 4, 3)


@pytest.mark.parametrize(
    ("ranks", "starts", "line", "debug"),
    [
        (
            (0, 2),
            (0, 4),
            "reads tp0, tp2: each 4 tensors, heads 0…7 (4 of each rank, in order)",
            [],
        ),
        (
            (1, 3),
            (4, 0),
            "reads tp1, tp3: each 4 tensors, heads 4…7 of tp1, heads 0…3 of tp3",
            [],
        ),
        ((0, 1), (0, 0), "reads tp0…1: each 4 tensors, heads 0…3 of each", []),
        (
            range(6),
            tuple(4 * number for number in SHUFFLED),
            "reads tp0…5: each 4 tensors, heads 0…23",
            [
                "reads tp0 (heads 8…11), tp1 (heads 0…3), tp2 (heads 20…23), tp3 (heads 4…7), tp4 (heads 16…19), "
                "tp5 (heads 12…15)"
            ],
        ),
    ],
)
def test_workers_that_are_read_alike_are_told_with_which_heads_come_from_which(
    ranks: Sequence[int], starts: Sequence[int], line: str, debug: list[str]
) -> None:
    (plan,) = plan_engine(sharded("D"), sharded())
    (route,) = plan.routes
    routes = []
    for rank, start in zip(ranks, starts, strict=True):
        slices = tuple(
            replace(item, heads=Range(start, start + 4)) for item in route.slices
        )
        routes.append(replace(route, place=Place(tp=rank), slices=slices))
    first, *more = replace(plan, routes=tuple(routes)).describe_all()
    assert f"]: {line}, 128 B/token, direct," in first
    assert [text.removeprefix("plan producer=P tp0 ") for text in more] == debug


def test_a_routes_bundles_are_placed_as_their_slices_are() -> None:
    """Attention in long runs beside states in short ones, behind longer ones of the producer."""
    consumer, producer = sharded("D", tp=2, model="hybrid"), sharded(model="hybrid")
    (plan, _) = plan_engine(consumer, producer, Costs(direct_min_bytes=65))
    for route in plan.routes:
        for bundle in route.bundles:
            placings = {
                route.slices[member].placing
                for place in bundle.members
                for member in place
            }
            assert placings == {route.placing_of(bundle)}
            assert bundle.run_bytes < 65 or placings == {Placing.DIRECT}
