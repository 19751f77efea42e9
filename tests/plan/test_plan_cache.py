"""A kept plan, moved to another producer's addresses, is the plan that would have been made for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import EngineDescription
from kvferry.worker.peers import plan_cache
from kvferry.worker.peers.plan_cache import PlanCache
from tests.draws import draws
from tests.geometry.drawn import Drawn, drawn
from tests.geometry.handmade import attention, pair, side

STAGED_RUNS = st.sampled_from((PUBLISHED.staged_run_bytes, 1024, 0))


def moved(
    engine: EngineDescription, by: Sequence[int], only_last: bool = False
) -> EngineDescription:
    """The engine with the caches of worker `i` further by `by[i]`; or with its last tensor alone."""
    workers = []
    for worker, distance in zip(engine.workers, by, strict=False):
        first = len(worker.tensors) - 1 if only_last else 0
        tensors = tuple(
            msgspec.structs.replace(tensor, base=tensor.base + distance)
            if index >= first
            else tensor
            for index, tensor in enumerate(worker.tensors)
        )
        workers.append(msgspec.structs.replace(worker, tensors=tensors))
    return msgspec.structs.replace(
        engine, workers=tuple(workers), engine_id="moved", boot="1" * 32
    )


@settings(deadline=None, max_examples=draws(80))
@given(
    drawn(),
    STAGED_RUNS,
    st.lists(st.integers(-(1 << 20), 1 << 45), min_size=64, max_size=64),
    st.booleans(),
)
def test_the_kept_plan_of_a_producer_that_lies_elsewhere_is_what_the_planner_would_say(
    case: Drawn, longest: int, by: list[int], only_last: bool
) -> None:
    costs = Costs(staged_run_bytes=longest)
    consumer, producer = case.consumer.description, case.producer.description
    other = moved(
        producer, [max(distance, -_lowest(producer)) for distance in by], only_last
    )
    for worker in range(len(consumer.workers)):
        cache = PlanCache(consumer, worker, costs)
        try:
            expected = plan_transfer(consumer, worker, other, costs)
            first = cache.plan(producer)
        except PlanRefused:
            event("refused")
            return
        assert first == plan_transfer(consumer, worker, producer, costs)
        assert cache.plan(other) == expected
        event("the kept plan" if len(cache) == 1 else "a plan of its own")
        assert only_last or len(cache) == 1


def _lowest(engine: EngineDescription) -> int:
    return min(
        (tensor.base for worker in engine.workers for tensor in worker.tensors),
        default=0,
    )


@pytest.fixture
def pair_of_engines() -> tuple[EngineDescription, EngineDescription]:
    model = attention()
    case = Drawn(pair(model, side(model, tp=2), side(model, tp=1), tokens=45))
    return case.consumer.description, case.producer.description


@pytest.fixture
def planned() -> Iterator[mock.Mock]:
    """Counts the plans that are made."""
    with mock.patch.object(plan_cache, "plan_transfer", wraps=plan_transfer) as counted:
        yield counted


def test_engines_of_one_shape_are_planned_once_and_others_each(
    pair_of_engines: tuple[EngineDescription, EngineDescription], planned: mock.Mock
) -> None:
    consumer, producer = pair_of_engines
    cache = PlanCache(consumer, 0)
    for distance in (0, 4096, 1 << 40):
        plan = cache.plan(moved(producer, [distance, 2 * distance]))
        assert plan.producer == "moved"
    assert planned.call_count == 1
    cache.plan(moved(producer, [64, 64], only_last=True))
    assert planned.call_count == 2
    other_facts = msgspec.structs.replace(producer.facts, dtype="another")
    with pytest.raises(PlanRefused):
        cache.plan(msgspec.structs.replace(producer, facts=other_facts))
    with pytest.raises(PlanRefused):
        cache.plan(msgspec.structs.replace(producer, workers=producer.workers[:1]))


def test_a_plan_of_what_may_be_mapped_is_kept_apart(
    pair_of_engines: tuple[EngineDescription, EngineDescription], planned: mock.Mock
) -> None:
    consumer, producer = pair_of_engines
    cache = PlanCache(consumer, 0)
    for mappable in (frozenset[int](), frozenset({0, 1}), frozenset({0})):
        for _ in range(2):
            cache.plan(producer, mappable)
    assert planned.call_count == 3


def test_an_address_behind_the_last_one_is_refused_although_its_shape_is_known(
    pair_of_engines: tuple[EngineDescription, EngineDescription],
) -> None:
    consumer, producer = pair_of_engines
    cache = PlanCache(consumer, 0)
    cache.plan(producer)
    with pytest.raises(InvalidMessage, match="base"):
        cache.plan(moved(producer, [(1 << 63) - 4096] * 2))


def test_what_is_kept_is_bounded(
    pair_of_engines: tuple[EngineDescription, EngineDescription],
    planned: mock.Mock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer, producer = pair_of_engines
    cache = PlanCache(consumer, 0)
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 2)
    shapes = [moved(producer, [64 * number] * 2, only_last=True) for number in range(3)]
    for shape in shapes:
        cache.plan(shape)
    assert len(cache) == 2
    cache.plan(shapes[2])
    assert planned.call_count == 3
    cache.plan(shapes[0])
    assert planned.call_count == 4, "the one that was used longest ago was forgotten"
    monkeypatch.setattr(plan_cache, "MAX_TENSORS", 1)
    cache.plan(shapes[0])
    assert planned.call_count == 5, "a large engine is planned each time"
