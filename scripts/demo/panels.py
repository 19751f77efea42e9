"""The dashboard as a table: what the panels of `deploy/grafana/kvferry.json` show at this moment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from scripts.accuracy.settings import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "kvferry.json"
Ask = Callable[[str], Sequence[tuple[Mapping[str, str], float]]]
"""A query → its series: labels and value."""

_MOST_SERIES = 4
_UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "ops": "/s"}
_LARGE = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel, under the heading of its row. `queries`: PromQL and legend of each; `unit`: Grafana's name."""

    row: str
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def read_panels(file: Path = DASHBOARD) -> list[Panel]:
    """All panels of a dashboard, in its order."""
    found: list[Panel] = []
    row = ""
    for panel in json.loads(file.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        queries = tuple((target["expr"], target["legendFormat"]) for target in panel["targets"])
        found.append(Panel(row, panel["title"], panel["fieldConfig"]["defaults"]["unit"], queries))
    return found


def dashboard_table(panels: Iterable[Panel], ask: Ask) -> Table:
    """A line for every panel that has data."""
    table = Table("", "panel", "now", title="deploy/grafana/kvferry.json, panel by panel")
    last = ""
    for panel in panels:
        series = [(text, *one) for query, text in panel.queries for one in ask(query) if one[1]]
        if series:
            values = [f"{legend(text, labels)} {shown(value, panel.unit)}" for text, labels, value in series]
            more = f" … {len(values) - _MOST_SERIES} more" if len(values) > _MOST_SERIES else ""
            if panel.row != last:
                table.add_section()
            table.add_row("" if panel.row == last else panel.row, panel.title, ", ".join(values[:_MOST_SERIES]) + more)
            last = panel.row
    return table


def legend(text: str, labels: Mapping[str, str]) -> str:
    """A legend with its labels filled in."""
    return _LABEL.sub(lambda match: labels.get(match[1], ""), text).strip()


def shown(value: float, unit: str) -> str:
    """A value as people read it.

    Example: `shown(0.0123, "s")` is `12.3 ms`.
    """
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    for size, prefix in _LARGE if unit != "s" else ():
        if value >= size:
            return f"{value / size:.3g} {prefix}{_UNITS.get(unit, '')}"
    return f"{value:.3g} {_UNITS.get(unit, '')}".rstrip()
