"""The dashboard asks only for metrics that exist, as what they are, and of the chosen engines."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.deploy.dashboard.promql import (
    DASHBOARD,
    OF_VLLM,
    asked,
    complaints,
    kept,
    panel_queries,
    samples,
    vllm_says,
)

QUERIES = panel_queries()


def test_every_query_asks_for_metrics_and_labels_that_exist() -> None:
    assert len(QUERIES) > 60
    for title, query, _ in QUERIES:
        assert asked(query), title
        assert complaints(query) == [], title


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("rate(vllm:kvferry_lods_total[1m])", "there is no"),
        ('rate(vllm:kvferry_failed_loads_total{reason=~"fence|fense"}[1m])', "no reason=fense"),
        ('rate(vllm:kvferry_loads_total{reason="x"}[1m])', "no label reason"),
    ],
)
def test_a_query_that_is_wrong_is_noticed(query: str, wrong: str) -> None:
    assert wrong in " ".join(complaints(query))


def test_every_metric_of_kvferry_is_shown_somewhere() -> None:
    shown = {one.name for _, query, _ in QUERIES for one in asked(query)}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples()} - set(OF_VLLM)
    assert stems - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == set()


def test_what_is_asked_of_vllm_is_there() -> None:
    assert [name for name in OF_VLLM if not vllm_says(name)] == []
    assert not vllm_says("vllm:of_tomorrow")


def test_every_query_is_of_the_chosen_engines_only() -> None:
    for title, query, _ in QUERIES:
        for one in asked(query):
            chosen = {label: one.matchers.get(label) for label in ("job", "instance", "engine")}
            assert chosen == {"job": "$job", "instance": "$instance", "engine": "$engine"}, title


def test_a_legend_names_only_labels_that_its_query_keeps() -> None:
    for title, query, legend in QUERIES:
        named = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert all(named <= labels for labels in kept(query)), f"{title}: {legend}"


def test_every_panel_has_a_number_of_its_own_and_a_description() -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] != "row" and not panel["description"]] == []


def test_every_variable_that_is_used_is_defined() -> None:
    text = DASHBOARD.read_text()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__range", "__all"}
    assert used == {variable["name"] for variable in json.loads(text)["templating"]["list"]}
