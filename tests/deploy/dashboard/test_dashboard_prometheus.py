"""A real Prometheus scrapes an engine under load: every panel has data, and every rule can be evaluated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.demo.dashboard import DASHBOARD, Prometheus, chosen, read_panels
from tests.deploy.dashboard.loaded_engine import loaded_engine
from tests.deploy.dashboard.promql import OF_VLLM, tool
from tests.deploy.dashboard.test_dashboard_alerts import NAMES
from tests.waiting import wait_until

CHOICES = {"$__rate_interval": "5s", "$__range": "30s", "$job": ".*", "$instance": ".*", "$engine": ".*"}
"""Grafana's value for "All"."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    command = tool("prometheus")
    with loaded_engine() as port:
        engines = {"decoders": f"http://127.0.0.1:{port}"}
        with Prometheus(command, engines, tmp_path_factory.mktemp("prometheus"), "250ms") as server:
            server.wait_ready(30, "/-/ready")
            grown = "min(rate(vllm:kvferry_loads_total[5s]))"
            wait_until(lambda: any(value > 0 for value in values(server, grown)), "some scrapes", 60)
            yield server


def values(prometheus: Prometheus, query: str) -> list[float]:
    return [value for _, value in prometheus.ask(query)]


def test_every_panel_has_data_under_load(prometheus: Prometheus) -> None:
    queries = {query: panel.title for panel in read_panels() for query, _ in panel.queries}
    waiting = {chosen(query, CHOICES): title for query, title in queries.items()}

    def all_have_data() -> bool:
        for expr in list(waiting):
            found = values(prometheus, expr)
            assert all(math.isfinite(value) for value in found), expr
            if any(value > 0 for value in found):
                del waiting[expr]
        return not waiting

    try:
        wait_until(all_have_data, "data in every panel", 40)
    finally:
        assert waiting == {}


def test_what_is_not_chosen_is_not_counted(prometheus: Prometheus) -> None:
    for choice, series in (
        ('job=~"decoders", engine=~".*"', [2.0]),
        ('job=~"decoders", engine=~"1"', [1.0]),
        ('job=~"others"', []),
    ):
        assert values(prometheus, f"count(vllm:kvferry_loads_total{{{choice}}})") == series


def test_every_variable_has_something_to_choose_from(prometheus: Prometheus) -> None:
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    asked = [variable["definition"] for variable in variables if variable["type"] == "query"]
    found = {}
    for definition in asked:
        parts = re.fullmatch(r"label_values\((.*), (\w+)\)", definition)
        assert parts is not None
        found[parts[2]] = prometheus.get(f"label/{parts[2]}/values", **{"match[]": chosen(parts[1], CHOICES)})
    assert found["job"] == ["decoders"]
    assert len(found["instance"]) == 1
    assert found["engine"] == ["0", "1"]


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "an evaluation", 30)
    assert {rule["name"]: rule["health"] for rule in rules()} == dict.fromkeys(NAMES, "ok")
    wait_until(
        lambda: {"KvferryIntegrityErrors"} <= {rule["name"] for rule in rules() if rule["alerts"]}, "an alert", 30
    )


def test_the_metrics_of_vllm_that_are_asked_for_are_reported(prometheus: Prometheus) -> None:
    assert [name for name in OF_VLLM if not values(prometheus, name)] == []
