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
    found.update({f"vllm:{gauge.exported}": Sample("gauge", {}) for gauge in GAUGES.values()})
    for shape in HISTOGRAMS.values():
        for suffix in ("bucket", "sum", "count"):
            labels = {"le": tuple(map(str, (*shape.buckets, "+Inf")))} if suffix == "bucket" else {}
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
        Asked(name, dict(_MATCHER.findall(matchers))) for name, matchers in _METRIC.findall(query)
    ]


def kept(query: str) -> list[set[str]]:
    """The labels that each aggregation of a query keeps."""
    return [set(re.findall(r"\w+", labels)) for labels in re.findall(r"\bby \(([^)]*)\)", query)]


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
                f"{one.name} has no {label}={part}" for part in named if part and part not in values
            ]
        known = {*sample.labels, "job", "instance", "engine"}
        wrong += [f"{one.name} has no label {label}" for label in {*one.matchers} - known]
    return wrong


def tool(name: str) -> str:
    """The path of a program of Prometheus, installed or beside Python (scripts/fetch_prometheus.sh), or a skip."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(
            f"NOT TESTED: {name} is not here (scripts/fetch_prometheus.sh); queries were only parsed"
        )
    return found


def panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard, in its order; those of a folded row are in the row."""
    rows = json.loads(DASHBOARD.read_text())["panels"]
    return [
        panel for row in rows for panel in (row, *row.get("panels", ())) if panel["type"] != "row"
    ]


def panel_queries() -> list[tuple[str, str, str]]:
    """The title, PromQL and legend of every query of the dashboard, in its order."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]


@dataclass(frozen=True, slots=True)
class Dimension:
    """Powers of bytes and of seconds: a rate of bytes is (1, -1). `share`: a part of a whole, of dimension (0, 0)."""

    of_bytes: int
    of_seconds: int
    share: bool = False

    def units(self) -> set[str]:
        """The names that Grafana has for it. A share of counts may be shown as a plain ratio too."""
        plain = {(0, 0): "short", (0, -1): "ops", (1, 0): "bytes", (1, -1): "Bps", (0, 1): "s"}
        return {plain[self.of_bytes, self.of_seconds]} | ({"percentunit"} if self.share else set())


def dimension(query: str) -> Dimension:
    """The dimension of a query's result, from the names of its metrics and what is done with them."""
    query = re.sub(r"\{[^}]*\}|\[[^]]*\]| by \([^)]*\) ", "", query).strip()
    for sign in (" / ", " + "):
        parts = _split(query, sign)
        if len(parts) > 1:
            first, second = map(dimension, parts)
            if sign == " + ":
                assert first == second, query
                return first
            powers = (first.of_bytes - second.of_bytes, first.of_seconds - second.of_seconds)
            return Dimension(*powers, share=powers == (0, 0))
    query = re.sub(r" > [\d.]+$", "", query)
    if call := re.fullmatch(r"(\w*)\((.*)\)", query):
        words = _split(call[2], ", ")
        found = dimension(words[1 if call[1] == "histogram_quantile" else 0])
        if call[1] == "rate":
            return Dimension(found.of_bytes, found.of_seconds - 1)
        if (
            call[1] == "histogram_quantile"
        ):  # of the rate of a bucket: what the bucket's bound measures
            (name,) = {one.name for one in asked(query)}
            return dimension(name.removesuffix("_bucket"))
        return found
    assert re.fullmatch(r"vllm:\w+", query), query
    stem = re.sub(r"_total$|_sum$", "", query)
    if stem.endswith(("_bucket", "_count")):
        return Dimension(0, 0)
    return Dimension(
        int("bytes" in stem), int("_seconds" in stem), stem.endswith(("_perc", "_fraction_now"))
    )


def _split(query: str, sign: str) -> list[str]:
    """The two sides of the first such sign that is inside of no brackets; the query alone if there is none."""
    for at in range(len(query)):
        if query.startswith(sign, at) and query[:at].count("(") == query[:at].count(")"):
            return [query[:at], query[at + len(sign) :]]
    return [query]
