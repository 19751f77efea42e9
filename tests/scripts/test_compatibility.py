"""The table of pairs in docs/compatibility.md: every row is another pair, with the planner's answer of now."""

from __future__ import annotations

import pytest

from kvferry.plan.planner import plan_engine
from scripts import compatibility
from scripts.compatibility import CHANGES, joined, pairs, with_answers
from scripts.generate_docs import part

ROWS = part("compatibility.md", "pairs")


def test_every_row_is_a_pair_of_its_own_and_every_change_is_used() -> None:
    rows = [line.rpartition(" | ")[0] for line in ROWS.splitlines()]
    assert len(set(rows)) == len(rows) > 35
    assert {what.partition("; ")[2] for what, _ in pairs(ROWS)} == {*CHANGES, ""}


def test_another_answer_of_the_planner_is_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_answers(ROWS) == ROWS.rstrip()
    monkeypatch.setattr(compatibility, "plan_engine", lambda *pair: plan_engine(*pair)[:1])
    assert with_answers(ROWS) != ROWS.rstrip()


def test_keys_are_added_or_replaced_and_changes_made_to_the_producer() -> None:
    assert joined("layers=4,heads=8", "tp=2,layers=6") == "layers=6,heads=8,tp=2"
    (_, plain), (_, changed) = pairs(
        "| a | `layers=2,heads=2,dim=64` |\n| x | a |  |  | - |\n| y; another fingerprint | a |  |  | - |\n"
    )
    assert changed[0].facts.fingerprint == "other weights"
    assert changed[1] == plain[1]
