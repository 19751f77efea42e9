"""The dashboard asks only for metrics that exist, as what they are, and of the chosen engines."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import product
from pathlib import Path

from tests.deploy.dashboard.promql import (
    DASHBOARD,
    OF_VLLM,
    asked,
    complaints,
    dimension,
    kept,
    panel_queries,
    panels,
    samples,
    tool,
    vllm_says,
)
from tests.deploy.dashboard.runbook import dead_links

QUERIES = panel_queries()


def test_every_query_asks_for_metrics_and_labels_that_exist() -> None:
    assert len(QUERIES) > 60
    for title, query, _ in QUERIES:
        assert asked(query), title
        assert complaints(query) == [], title


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


def test_the_unit_of_every_panel_is_that_of_all_its_queries() -> None:
    for panel in panels():
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["overrides"] == [], "a unit of its own for one of the queries"
        for target in panel["targets"]:
            units = dimension(target["expr"]).units()
            assert unit in units, (
                f"{panel['title']}: {target['legendFormat']} is in {units}, not {unit}"
            )


def test_units_come_from_the_query() -> None:
    rate = "sum by (peer) (rate({}[5m]))"
    assert dimension(rate.format("vllm:kvferry_handshake_seconds_count")).units() == {"ops"}
    assert dimension(
        "histogram_quantile(0.9, sum by (le) (rate(vllm:a_seconds_bucket[5m])))"
    ).units() == {"s"}
    assert dimension(
        f"{rate.format('vllm:a_bytes_total')} / {rate.format('vllm:t_seconds_sum')}"
    ).units() == {"Bps"}
    assert dimension(
        f"{rate.format('vllm:a_seconds_sum')} / {rate.format('vllm:a_seconds_count')}"
    ).units() == {"s"}
    assert dimension("sum(increase(vllm:a_total[5m]))").units() == {"short"}
    assert (
        "percentunit"
        in dimension("rate(vllm:a_total[1m]) / clamp_min((rate(vllm:b_total[1m])), 1e-9)").units()
    )


def test_rows_are_folded_but_the_first_two() -> None:
    rows = [
        panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] == "row"
    ]
    assert [row["title"] for row in rows if not row["collapsed"]] == [
        "At a glance",
        "What users wait for",
    ]
    assert all(row["panels"] for row in rows if row["collapsed"])
    numbers = [panel["id"] for panel in (*rows, *panels())]
    assert len(set(numbers)) == len(numbers)


def test_no_two_panels_of_a_row_overlap() -> None:
    for row in json.loads(DASHBOARD.read_text())["panels"]:
        places = [panel["gridPos"] for panel in (row, *row.get("panels", ()))]
        columns = [range(at["x"], at["x"] + at["w"]) for at in places]
        lines = [range(at["y"], at["y"] + at["h"]) for at in places]
        taken = [
            place
            for wide, high in zip(columns, lines, strict=True)
            for place in product(wide, high)
        ]
        assert len(set(taken)) == len(taken), row["title"]
        assert max(x for x, _ in taken) < 24


def test_links_lead_to_headings_of_the_documentation() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert {link["title"] for link in dashboard["links"]} >= {"What to do", "Metrics", "Streaming"}
    assert dead_links([link["url"] for link in dashboard["links"]]) == []
    linked = {
        panel["title"]: [link["url"] for link in panel.get("links", ())] for panel in panels()
    }
    assert sum(map(bool, linked.values())) > 30
    assert dead_links([url for urls in linked.values() for url in urls]) == []


def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"q{at}", "expr": re.sub(r"\$__\w+", "5m", query)}
        for at, (_, query, _) in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.json"  # which is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        [tool("promtool"), "check", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
