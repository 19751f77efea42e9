"""Metrics and labels in PromQL queries, compared with those of kvferry and vLLM; programs of Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm

from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS
from scripts.accuracy.settings import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "kvferry.json"
_METRIC = re.compile(r"\b(vllm:\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*[=!]~?\s*"([^"]*)"')
_LOGGERS = Path(vllm.__file__).parent / "v1" / "metrics" / "loggers.py"
OF_VLLM = {
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:request_success_total": "counter",
    "vllm:time_to_first_token_seconds_bucket": "bucket",
}
"""vLLM's own metrics that queries use."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A name in `/metrics`. `values`: its own label's possible values, {} for one without."""

    kind: str
    labels: Mapping[str, tuple[str, ...]]


def samples() -> dict[str, Sample]:
    """Every name that kvferry exports, and those of vLLM's that are asked for."""
    found = {name: Sample(kind, {}) for name, kind in OF_VLLM.items()}
    for counter in COUNTERS.values():
        labels = {counter.label: counter.values} if counter.label else {}
        found[f"vllm:{counter.exported}_total"] = Sample("counter", labels)
    found.update(
        {f"vllm:{gauge.exported}": Sample("gauge", {}) for gauge in GAUGES.values()}
    )
    for shape in HISTOGRAMS.values():
        for suffix in ("bucket", "sum", "count"):
            labels = (
                {"le": tuple(map(str, (*shape.buckets, "+Inf")))}
                if suffix == "bucket"
                else {}
            )
            found[f"vllm:{shape.exported}_{suffix}"] = Sample(suffix, labels)
    return found


def vllm_says(name: str) -> bool:
    """Whether vLLM's source has such a metric."""
    return f'name="{re.sub("_(total|bucket)$", "", name)}"' in _LOGGERS.read_text()


@dataclass(frozen=True, slots=True)
class Asked:
    """A metric in a query. `matchers`: label → value."""

    name: str
    matchers: Mapping[str, str]


def asked(query: str) -> list[Asked]:
    """All metrics of a query."""
    return [
        Asked(name, dict(_MATCHER.findall(matchers)))
        for name, matchers in _METRIC.findall(query)
    ]


def complaints(query: str) -> list[str]:
    """Metrics, labels and values that are not there. Whether the query is right, Prometheus says."""
    wrong = []
    for one in asked(query):
        sample = samples().get(one.name)
        if sample is None:
            wrong.append(f"there is no {one.name}")
            continue
        for label, values in sample.labels.items():
            named = one.matchers.get(label, "").split("|")
            wrong += [
                f"{one.name} has no {label}={part}"
                for part in named
                if part and part not in values
            ]
        known = {*sample.labels, "job", "instance", "engine"}
        wrong += [
            f"{one.name} has no label {label}" for label in {*one.matchers} - known
        ]
    return wrong


def tool(name: str) -> str:
    """The path of a program of Prometheus, installed or beside Python (scripts/fetch_prometheus.sh), or a skip."""
    found = shutil.which(name) or shutil.which(
        name, path=str(Path(sys.executable).parent)
    )
    if found is None:
        pytest.skip(
            f"NOT TESTED: {name} is not here (scripts/fetch_prometheus.sh); queries were only parsed"
        )
    return found


def panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard, in its order; those of a folded row are in the row."""
    rows = json.loads(DASHBOARD.read_text())["panels"]
    return [
        panel
        for row in rows
        for panel in (row, *row.get("panels", ()))
        if panel["type"] != "row"
    ]


def panel_queries() -> list[tuple[str, str, str]]:
    """The title, PromQL and legend of every query of the dashboard, in its order."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]
