"""The dashboard is made from its description, and asks only for what there is, as what it is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from scripts.dashboard import FILE, ROWS, as_text, main
from scripts.dashboard_parts import Panel, Query
from tests.deploy.dashboard.promql import OF_VLLM, asked, complaints, samples, vllm_says

PANELS = [panel for row in ROWS for panel in row.panels]
QUERIES = [(panel, query) for panel in PANELS for query in panel.queries]


def parsable(query: str) -> str:
    """With Grafana's variables replaced."""
    return query.replace("$__rate_interval", "1m").replace("$__range", "1h")


def test_the_file_is_made_from_its_description() -> None:
    assert FILE.read_text() == as_text(), "run `python -m scripts.dashboard`"
    assert main(["--check"]) == 0


@pytest.mark.parametrize(("panel", "query"), QUERIES, ids=lambda x: getattr(x, "title", None) or x.legend)
def test_every_query_asks_for_metrics_that_exist_as_what_they_are(panel: Panel, query: Query) -> None:
    found = asked(parsable(query.expr))
    assert found
    assert [wrong for one in found for wrong in complaints(one)] == []


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("rate(vllm:kvferry_lods_total[1m])", "there is no"),
        ("sum(vllm:kvferry_loads_total)", "only grows"),
        ("rate(vllm:kvferry_quarantined_blocks_now[1m])", "is a gauge"),
        ("sum(rate(vllm:kvferry_handover_seconds_bucket[1m]))", "without le"),
        ("histogram_quantile(0.9, rate(vllm:kvferry_loads_total[1m]))", "no quantiles"),
        ('rate(vllm:kvferry_failed_loads_total{reason=~"fence|fense"}[1m])', "no reason=fense"),
        ('rate(vllm:kvferry_loads_total{reason="x"}[1m])', "no label reason"),
    ],
)
def test_a_query_that_is_wrong_is_noticed(query: str, wrong: str) -> None:
    assert wrong in " ".join(complaint for one in asked(query) for complaint in complaints(one))


def test_every_metric_of_kvferry_is_shown_somewhere() -> None:
    shown = {one.name for _, query in QUERIES for one in asked(parsable(query.expr))}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples()} - set(OF_VLLM)
    assert stems - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == set()


def test_what_is_asked_of_vllm_is_there() -> None:
    assert [name for name in OF_VLLM if not vllm_says(name)] == []
    assert not vllm_says("vllm:of_tomorrow")


def test_every_query_is_of_the_chosen_engines_only() -> None:
    for panel, query in QUERIES:
        for one in asked(parsable(query.expr)):
            chosen = {
                label: value for label, (_, value) in one.matchers.items() if label in ("job", "instance", "engine")
            }
            assert chosen == {"job": "$job", "instance": "$instance", "engine": "$engine"}, panel.title


def test_a_legend_names_only_labels_that_its_query_keeps() -> None:
    for panel, query in QUERIES:
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        kept = [set(one.by) for one in asked(parsable(query.expr))]
        assert all(named <= by for by in kept), f"{panel.title}: {query.legend}"


def test_panels_have_numbers_of_their_own_and_lie_beside_one_another() -> None:
    made: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
    assert len({panel["id"] for panel in made}) == len(made)
    taken: set[tuple[int, int]] = set()
    for panel in made:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_every_variable_that_is_used_is_defined() -> None:
    text = FILE.read_text()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__range", "__all"}
    assert used == {variable["name"] for variable in json.loads(text)["templating"]["list"]}
