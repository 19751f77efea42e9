"""The table of pairs in docs/compatibility.md is what the planner says now."""

from __future__ import annotations

import pytest

from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from scripts import compatibility
from scripts.compatibility import MODELS, PAIRS, Pair, answer, engines, joined, table
from scripts.generate_docs import COMPATIBILITY_PAGE


def test_the_page_has_the_table_of_now() -> None:
    assert table() in COMPATIBILITY_PAGE.read_text(), "run `python -m scripts.generate_docs`"


def test_every_row_is_a_pair_of_its_own() -> None:
    rows = [(pair.model, pair.producer, pair.consumer, pair.words) for pair in PAIRS]
    assert len(set(rows)) == len(rows)
    assert {pair.model for pair in PAIRS} == set(MODELS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.what} {pair.producer} {pair.consumer}")
def test_an_answer_is_the_planners(pair: Pair) -> None:
    """Rows that work have a plan for every consumer worker, refused ones name their first reason."""
    producer, consumer = engines(pair)
    found = answer(pair)
    if found.startswith("**refused**"):
        with pytest.raises(PlanRefused) as refused:
            plan_engine(consumer, producer)
        assert found.startswith(f"**refused**: {refused.value.reasons[0]}")
        return
    plans = plan_engine(consumer, producer)
    routes = [route for plan in plans for route in plan.routes if route.slices]
    assert found.startswith(("**direct", "**staged"))
    assert f": {len(routes)} route" in found
    assert len(plans) == len(consumer.workers)


def test_another_answer_of_the_planner_is_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table()
    monkeypatch.setattr(compatibility, "plan_engine", lambda *pair: plan_engine(*pair)[:1])
    assert table() != before


def test_a_sides_keys_are_added_to_the_models_or_replace_them() -> None:
    assert joined("layers=4,heads=8", "tp=2") == "layers=4,heads=8,tp=2"
    assert joined("layers=4,heads=8", "layers=6") == "layers=6,heads=8"
    assert joined("layers=4", "") == "layers=4"


def test_a_change_is_made_to_the_producer_or_to_both() -> None:
    plain = Pair("", "GQA", "tp=2", "tp=2")
    changed = Pair("", "GQA", "tp=2", "tp=2", "", compatibility.facts(dtype="other"))
    assert engines(plain)[0].facts == engines(plain)[1].facts
    producer, consumer = engines(changed)
    assert producer.facts.dtype == "other" != consumer.facts.dtype
    assert producer.workers == engines(plain)[0].workers
