"""The dashboard asks only for metrics that exist, as what they are, and of the chosen engines."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.deploy.dashboard.promql import (
    DASHBOARD,
    OF_VLLM,
    asked,
    complaints,
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
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples()} - set(
        OF_VLLM
    )
    assert (
        stems - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == set()
    )


def test_what_is_asked_of_vllm_is_there() -> None:
    assert [name for name in OF_VLLM if not vllm_says(name)] == []
    assert not vllm_says("vllm:of_tomorrow")


def test_every_query_is_of_the_chosen_engines_only() -> None:
    for title, query, _ in QUERIES:
        for one in asked(query):
            chosen = {
                label: one.matchers.get(label)
                for label in ("job", "instance", "engine")
            }
            assert chosen == {
                "job": "$job",
                "instance": "$instance",
                "engine": "$engine",
            }, title


def test_links_lead_to_headings_of_the_documentation() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert {link["title"] for link in dashboard["links"]} >= {
        "What to do",
        "Metrics",
        "Streaming",
    }
    assert dead_links([link["url"] for link in dashboard["links"]]) == []
    linked = {
        panel["title"]: [link["url"] for link in panel.get("links", ())]
        for panel in panels()
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
        [tool("promtool"), "check", "rules", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
