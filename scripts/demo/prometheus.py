"""A Prometheus that scrapes some engines, and what it has for the dashboard's panels."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from scripts.accuracy.devices import free_ports
from scripts.accuracy.processes import Server
from scripts.accuracy.settings import ROOT

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
CHOSEN = {"$__rate_interval": "1m", "$__range": "15m", "$job": ".*", "$instance": ".*", "$engine": ".*"}
"""Values of Grafana's variables when all engines are chosen."""


def program(name: str = "prometheus") -> str | None:
    """A program of Prometheus, installed or beside this Python, where bootstrap puts it; None without one."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


class Prometheus(Server):
    """Scrapes engines every second.

    Args:
        engines: by name, where they are.
    """

    def __init__(self, command: str, engines: Mapping[str, str], folder: Path) -> None:
        (port,) = free_ports(1)
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "prometheus.json"  # which is YAML
        config.write_text(json.dumps(config_of(engines)))
        super().__init__(
            "Prometheus",
            [
                command,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            f"http://127.0.0.1:{port}",
            folder / "prometheus.log",
            {},
        )

    def ask(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """The series that a query has now, with their labels; without those that have no value.

        Raises:
            httpx.HTTPError: there is no answer, or the query is invalid.
        """
        answer = httpx.get(f"{self.base_url}/api/v1/query", params={"query": chosen(query)}, trust_env=False)
        answer.raise_for_status()
        return series_of(answer.json())


def config_of(engines: Mapping[str, str]) -> dict[str, Any]:
    """Prometheus's configuration; a job for every engine, so that the dashboard can choose among them by name."""
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [urlsplit(url).netloc]}]} for name, url in engines.items()
        ],
    }


def chosen(query: str, choices: Mapping[str, str] = CHOSEN) -> str:
    """A panel's query with Grafana's variables filled in."""
    for variable, value in choices.items():
        query = query.replace(variable, value)
    return query


def series_of(answer: Mapping[str, Any]) -> list[tuple[Mapping[str, str], float]]:
    """Out of what the API answers."""
    every = [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]
    return [(labels, value) for labels, value in every if not math.isnan(value)]
