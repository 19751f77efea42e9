"""A real Prometheus scrapes an engine under load: every panel has data, and every rule can be evaluated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.accuracy.devices import free_ports
from scripts.accuracy.processes import Server
from scripts.accuracy.settings import ROOT
from tests.deploy.dashboard.loaded_engine import loaded_engine
from tests.deploy.dashboard.promql import DASHBOARD, OF_VLLM, panel_queries, tool
from tests.deploy.dashboard.test_dashboard_alerts import NAMES
from tests.waiting import wait_until

CHOICES = {"$__rate_interval": "5s", "$__range": "30s", "$job": ".*", "$instance": ".*", "$engine": ".*"}
"""Grafana's value for "All"."""


class Prometheus(Server):
    """Scrapes one engine as the job `decoders`, with the alerts."""

    def __init__(self, command: str, engine_port: int, folder: Path) -> None:
        (port,) = free_ports(1)
        target = {"job_name": "decoders", "static_configs": [{"targets": [f"127.0.0.1:{engine_port}"]}]}
        settings = {
            "global": {"scrape_interval": "250ms", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "deploy" / "prometheus" / "alerts.yml")],
            "scrape_configs": [target],
        }
        config = folder / "prometheus.json"  # which is YAML
        config.write_text(json.dumps(settings))
        arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", "--log.level=warn"]
        arguments.append(f"--web.listen-address=127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}"
        super().__init__("Prometheus", [command, *arguments], url, folder / "prometheus.log", {})

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer of the API."""
        answer = httpx.get(f"{self.base_url}/api/v1/{path}", params=arguments, trust_env=False)
        answer.raise_for_status()
        return answer.json()["data"]


def chosen(query: str) -> str:
    """A query with Grafana's variables filled in."""
    for variable, value in CHOICES.items():
        query = query.replace(variable, value)
    return query


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    command = tool("prometheus")
    with loaded_engine() as port, Prometheus(command, port, tmp_path_factory.mktemp("prometheus")) as server:
        server.wait_ready(30, "/-/ready")
        grown = "min(rate(vllm:kvferry_loads_total[5s]))"
        wait_until(lambda: any(value > 0 for value in values(server, grown)), "some scrapes", 60)
        yield server


def values(prometheus: Prometheus, query: str) -> list[float]:
    found = [float(one["value"][1]) for one in prometheus.get("query", query=query)["result"]]
    return [value for value in found if not math.isnan(value)]


def test_every_panel_has_data_under_load(prometheus: Prometheus) -> None:
    waiting = {chosen(query): title for title, query, _ in panel_queries()}

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
        found[parts[2]] = prometheus.get(f"label/{parts[2]}/values", **{"match[]": chosen(parts[1])})
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
