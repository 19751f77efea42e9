"""Parts of a Grafana dashboard, as far as kvferry's needs them, and its JSON.

A panel is a title, a sentence that an operator reads at night, a unit and some queries. Everything else (ids, places,
colours, axes) is chosen here, the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SELECT = 'job=~"$job", instance=~"$instance", engine=~"$engine"'
"""Labels of every query: the dashboard's variables."""
RANGE = "$__rate_interval"
"""Grafana's: at least four scrapes."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_HEIGHT = {"timeseries": 8, "heatmap": 8, "stat": 4}

Kind = Literal["timeseries", "heatmap", "stat"]


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the name of each of its series; `{{label}}` in it is replaced."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart.

    Attributes:
        unit: Grafana's name: `s`, `bytes`, `Bps`, `short`, `ops`, `percentunit`.
        red_above: for a `stat`, the value above which it is red; None: never.
        width: of the dashboard's 24 columns.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    red_above: float | None = None
    stacked: bool = False
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def selector(name: str, labels: str = "") -> str:
    """A metric of the chosen engines: `vllm:name{…}`."""
    return f"vllm:{name}{{{SELECT}{', ' + labels if labels else ''}}}"


def total(name: str, by: str = "", labels: str = "") -> str:
    """A gauge, or a counter since the engine's start, added up."""
    return f"sum{_by(by)}({selector(name, labels)})"


def rate(name: str, by: str = "", labels: str = "") -> str:
    """A counter's growth a second."""
    return f"sum{_by(by)}(rate({selector(name, labels)}[{RANGE}]))"


def growth(name: str, by: str = "", labels: str = "") -> str:
    """A counter's growth over what the dashboard shows."""
    return f"sum{_by(by)}(increase({selector(name, labels)}[$__range]))"


def quantile(share: float, histogram: str) -> str:
    """A quantile of a histogram over all chosen engines."""
    return f"histogram_quantile({share:g}, sum by (le) (rate({selector(histogram + '_bucket')}[{RANGE}])))"


def mean(histogram: str) -> str:
    """The mean of a histogram. Has no value while nothing is observed."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def quantiles(histogram: str, shares: Sequence[float] = (0.5, 0.9, 0.99)) -> tuple[Query, ...]:
    """Some quantiles, named p50 and so on."""
    return tuple(Query(quantile(share, histogram), f"p{share * 100:g}") for share in shares)


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def dashboard_json(title: str, uid: str, description: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
        panels.append({"collapsed": False, "gridPos": place, "panels": [], "title": row.title, "type": "row"})
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(_panel(panel, {"h": _HEIGHT[panel.kind], "w": panel.width, "x": x, "y": y}))
            x, height = x + panel.width, max(height, _HEIGHT[panel.kind])
        y += height
    for number, made in enumerate(panels, start=1):
        made["id"] = number
    return {
        "description": description,
        "editable": True,
        "graphTooltip": 1,
        "panels": panels,
        "refresh": "30s",
        "schemaVersion": 39,
        "tags": ["kvferry", "vllm"],
        "templating": {"list": [_source_variable(), *_variables()]},
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "title": title,
        "uid": uid,
        "version": 1,
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "datasource": _SOURCE,
            "expr": query.expr,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            "legendFormat": query.legend,
            "refId": chr(ord("A") + number),
        }
        for number, query in enumerate(panel.queries)
    ]
    return {
        "datasource": _SOURCE,
        "description": panel.description,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "gridPos": place,
        "options": _options(panel),
        "targets": targets,
        "title": panel.title,
        "type": panel.kind,
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        stacking = {"group": "A", "mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"fillOpacity": 30 if panel.stacked else 5, "showPoints": "never", "stacking": stacking}
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Oranges"}}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variables() -> list[dict[str, Any]]:
    known = ""
    variables = []
    for name in ("job", "instance", "engine"):
        query = f"label_values(vllm:kvferry_loads_total{{{known}}}, {name})"
        variables.append(
            {
                "name": name,
                "label": name,
                "type": "query",
                "datasource": _SOURCE,
                "definition": query,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "sort": 1,
                "includeAll": True,
                "allValue": ".*",
                "multi": True,
                "current": {"text": ["All"], "value": ["$__all"]},
            }
        )
        known += f'{", " if known else ""}{name}=~"${name}"'
    return variables
