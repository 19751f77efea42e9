"""The table of pairs in docs/compatibility.md: every row is another pair, with the planner's answer of now."""

from __future__ import annotations

import pytest

from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from scripts import compatibility
from scripts.compatibility import MODELS, PAIRS, Pair, answer, engines, joined, table


def test_every_row_is_a_pair_of_its_own() -> None:
    rows = [(pair.model, pair.producer, pair.consumer, pair.words) for pair in PAIRS]
    assert len(set(rows)) == len(rows)
    assert {pair.model for pair in PAIRS} == set(MODELS)


def test_answers_are_the_planners() -> None:
    """Rows that work have a plan for every consumer worker, refused ones name their first reason."""
    for pair in PAIRS:
        producer, consumer = engines(pair)
        found = answer(pair)
        if found.startswith("**refused**"):
            with pytest.raises(PlanRefused) as refused:
                plan_engine(consumer, producer)
            assert found.startswith(f"**refused**: {refused.value.reasons[0]}"), pair.what
            continue
        plans = plan_engine(consumer, producer)
        routes = [route for plan in plans for route in plan.routes if route.slices]
        assert found.startswith(("**direct", "**staged")), pair.what
        assert f": {len(routes)} route" in found, pair.what
        assert len(plans) == len(consumer.workers), pair.what


def test_another_answer_of_the_planner_is_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table()
    monkeypatch.setattr(compatibility, "plan_engine", lambda *pair: plan_engine(*pair)[:1])
    assert table() != before


def test_keys_are_added_or_replaced_and_changes_made_to_the_producer() -> None:
    assert joined("layers=4,heads=8", "tp=2,layers=6") == "layers=6,heads=8,tp=2"
    producer, consumer = engines(Pair("", "GQA", "tp=2", "tp=2", "", compatibility.facts(dtype="other")))
    assert producer.facts.dtype == "other" != consumer.facts.dtype
    assert producer.workers == engines(Pair("", "GQA", "tp=2", "tp=2"))[0].workers
