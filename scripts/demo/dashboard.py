"""The dashboard's values now: a Prometheus that scrapes some engines, and a table of what the panels show."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.table import Table

from scripts.accuracy.devices import free_ports
from scripts.accuracy.processes import Server
from scripts.accuracy.settings import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "kvferry.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
CHOSEN = {"$__rate_interval": "1m", "$__range": "15m", "$job": ".*", "$instance": ".*", "$engine": ".*"}
"""Values of Grafana's variables when all engines are chosen."""
Ask = Callable[[str], Sequence[tuple[Mapping[str, str], float]]]
"""A query → its series: labels and value."""

_MOST_SERIES = 4
_UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "ops": "/s"}
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def program(name: str = "prometheus") -> str | None:
    """A program of Prometheus, installed or beside this Python (scripts/fetch_prometheus.sh); None without one."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


class Prometheus(Server):
    """Scrapes engines, each as a job, so that the dashboard can choose among them by name.

    Args:
        engines: by name, where they are.
        interval: between two scrapes, as Prometheus writes it.
    """

    def __init__(self, command: str, engines: Mapping[str, str], folder: Path, interval: str = "1s") -> None:
        (port,) = free_ports(1)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = {name: [{"targets": [urlsplit(url).netloc]}] for name, url in engines.items()}
        settings = {
            "global": {"scrape_interval": interval, "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": name, "static_configs": targets} for name, targets in jobs.items()],
        }
        config = folder / "prometheus.json"  # which is YAML
        config.write_text(json.dumps(settings))
        arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", "--log.level=warn"]
        arguments.append(f"--web.listen-address=127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}"
        super().__init__("Prometheus", [command, *arguments], url, folder / "prometheus.log", {})

    def ask(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """The series that a query has now, with their labels; without those that have no value.

        Raises:
            httpx.HTTPError: there is no answer, or the query is invalid.
        """
        found = self.get("query", query=chosen(query))["result"]
        every = [(one["metric"], float(one["value"][1])) for one in found]
        return [(labels, value) for labels, value in every if not math.isnan(value)]

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer of the API. Raises like `ask`."""
        answer = httpx.get(f"{self.base_url}/api/v1/{path}", params=arguments, trust_env=False)
        answer.raise_for_status()
        return answer.json()["data"]


def chosen(query: str, choices: Mapping[str, str] = CHOSEN) -> str:
    """A panel's query with Grafana's variables filled in."""
    for variable, value in choices.items():
        query = query.replace(variable, value)
    return query


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `queries`: PromQL and legend of each; `unit`: Grafana's name."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def read_panels(file: Path = DASHBOARD) -> list[Panel]:
    """All panels of a dashboard, in its order."""
    return [
        Panel(
            title=panel["title"],
            unit=panel["fieldConfig"]["defaults"]["unit"],
            queries=tuple((target["expr"], target["legendFormat"]) for target in panel["targets"]),
        )
        for panel in json.loads(file.read_text())["panels"]
        if panel["type"] != "row"
    ]


def dashboard_table(panels: Iterable[Panel], ask: Ask) -> Table:
    """A line for every panel that has data."""
    table = Table("panel", "now", title="deploy/grafana/kvferry.json, panel by panel")
    for panel in panels:
        series = [(text, *one) for query, text in panel.queries for one in ask(query) if one[1]]
        values = [f"{_legend(text, labels)} {_shown(value, panel.unit)}" for text, labels, value in series]
        if values:
            more = f" … {len(values) - _MOST_SERIES} more" if len(values) > _MOST_SERIES else ""
            table.add_row(panel.title, ", ".join(values[:_MOST_SERIES]) + more)
    return table


def _legend(text: str, labels: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda match: labels.get(match[1], ""), text).strip()


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s" and value < 1:
        return f"{value * 1e3:,.3g} ms"
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} {_UNITS.get(unit, '')}".rstrip()
