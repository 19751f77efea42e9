"""A real Prometheus scrapes an engine under load: every panel has data, and every rule can be evaluated."""

from __future__ import annotations

import json
import math
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.demo.panels import DASHBOARD, read_panels
from scripts.demo.prometheus import chosen
from tests.deploy.dashboard.loaded_engine import loaded_engine
from tests.deploy.dashboard.prometheus_tools import tool
from tests.deploy.dashboard.promql import OF_VLLM
from tests.deploy.dashboard.test_dashboard_alerts import FILE as ALERTS
from tests.deploy.dashboard.test_dashboard_alerts import NAMES
from tests.harness.cache_engine import free_port
from tests.waiting import wait_until

CHOICES = {"$__rate_interval": "5s", "$__range": "30s", "$job": ".*", "$instance": ".*", "$engine": ".*"}
"""Grafana's value for "All"."""


class Prometheus:
    """A server of its own, that scrapes one target four times a second."""

    def __init__(self, folder: Path, target: int) -> None:
        self._url = f"http://127.0.0.1:{free_port()}/api/v1/"
        config = {
            "global": {"scrape_interval": "250ms", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "decoders", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        }
        file = folder / "prometheus.json"  # which is YAML
        file.write_text(json.dumps(config))
        self.process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={urllib.parse.urlsplit(self._url).netloc}",
                "--log.level=warn",
            ]
        )

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer; None when there is no answer yet."""
        try:
            with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(arguments)}", timeout=5) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            if refused.code == 503:  # it has only just begun
                return None
            raise AssertionError(f"{arguments}: {refused.read().decode()}") from refused
        except OSError:
            return None

    def values(self, query: str) -> list[float]:
        """Of all series that a query has now, without those that have no value."""
        found = self.get("query", query=query)
        every = [float(series["value"][1]) for series in found["result"]] if found else []
        return [value for value in every if not math.isnan(value)]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    tool("prometheus")
    with loaded_engine() as port:
        server = Prometheus(tmp_path_factory.mktemp("prometheus"), port)
        try:
            grown = "min(rate(vllm:kvferry_loads_total[5s]))"
            wait_until(lambda: any(value > 0 for value in server.values(grown)), "some scrapes", 60)
            yield server
        finally:
            server.end()


def test_every_panel_has_data_under_load(prometheus: Prometheus) -> None:
    queries = {query: panel.title for panel in read_panels() for query, _ in panel.queries}
    waiting = {chosen(query, CHOICES): title for query, title in queries.items()}

    def all_have_data() -> bool:
        for expr in list(waiting):
            values = prometheus.values(expr)
            assert all(math.isfinite(value) for value in values), expr
            if any(value > 0 for value in values):
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
        assert prometheus.values(f"count(vllm:kvferry_loads_total{{{choice}}})") == series


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
    assert [name for name in OF_VLLM if not prometheus.values(name)] == []
