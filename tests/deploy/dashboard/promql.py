"""Metrics and labels in PromQL queries, parsed and compared with those of kvferry and vLLM; programs of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import vllm

from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS
from scripts.demo.dashboard import program

_LOGGERS = Path(vllm.__file__).parent / "v1" / "metrics" / "loggers.py"
OF_VLLM = {"vllm:kv_cache_usage_perc": "gauge", "vllm:request_success_total": "counter"}
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
    return f'name="{name.removesuffix("_total")}"' in _LOGGERS.read_text()


@dataclass(frozen=True, slots=True)
class Asked:
    """A metric in a query.

    Attributes:
        within: what it is in, from the outside: names of functions, aggregations and operators.
        by: labels that the innermost aggregation keeps.
        matchers: label → (operator, value).
    """

    name: str
    within: tuple[str, ...]
    by: tuple[str, ...]
    matchers: Mapping[str, tuple[str, str]]


def asked(query: str) -> list[Asked]:
    """All metrics of a query. Raises ValueError for what is not PromQL."""
    return list(_walk(promql_parser.parse(query), (), ()))


def _walk(node: Any, within: tuple[str, ...], by: tuple[str, ...]) -> Iterator[Asked]:
    if isinstance(node, promql_parser.VectorSelector):
        matchers = {match.name: (str(match.op), match.value) for match in node.matchers.matchers}
        yield Asked(str(node.name), within, by, matchers)
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from _walk(node.vector_selector, within, by)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _walk(argument, (*within, node.func.name), by)
    elif isinstance(node, promql_parser.AggregateExpr):
        kept = tuple(node.modifier.labels) if node.modifier is not None else ()
        yield from _walk(node.expr, (*within, str(node.op)), kept)
    elif isinstance(node, promql_parser.BinaryExpr):
        for side in (node.lhs, node.rhs):
            yield from _walk(side, (*within, str(node.op)), by)
    elif isinstance(node, (promql_parser.ParenExpr, promql_parser.UnaryExpr)):
        yield from _walk(node.expr, within, by)
    else:
        assert isinstance(node, promql_parser.NumberLiteral), f"a kind of expression that is not foreseen: {node}"


def complaints(one: Asked) -> list[str]:
    """Errors in a query's use of a metric."""
    sample = samples().get(one.name)
    if sample is None:
        return [f"there is no {one.name}"]
    wrong = []
    grows = any(function in ("rate", "increase") for function in one.within)
    if sample.kind == "gauge":
        if grows:
            wrong.append(f"{one.name} is a gauge, which has no rate")
    elif not grows and not re.search(r"_(opened|released)_total$", one.name):
        wrong.append(f"{one.name} only grows: ask for its rate or increase")
    if sample.kind == "bucket" and "le" not in one.by:
        wrong.append(f"{one.name} is asked for without le")
    if "histogram_quantile" in one.within and sample.kind != "bucket":
        wrong.append(f"{one.name} has no quantiles")
    for label, values in sample.labels.items():
        _, value = one.matchers.get(label, ("", ""))
        wrong += [f"{one.name} has no {label}={part}" for part in value.split("|") if part and part not in values]
    known = {*sample.labels, "job", "instance", "engine"}
    return wrong + [f"{one.name} has no label {label}" for label in {*one.matchers} - known]


def tool(name: str) -> str:
    """The path of a program of Prometheus, installed or beside Python (scripts/bootstrap_prometheus.py), or a skip."""
    found = program(name)
    if found is None:
        pytest.skip(f"NOT TESTED: {name} is not installed, and bootstrap could not fetch it; queries were only parsed")
    return found
