"""The table of metrics: what each means, from where it is defined, and what to do about it."""

from __future__ import annotations

from scripts.metric_advice import ADVICE


def exported() -> tuple[str, ...]:
    """All names without `vllm:` and `_total`."""
    from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS

    return tuple(spec.exported for kind in (COUNTERS, GAUGES, HISTOGRAMS) for spec in kind.values())


def table() -> str:
    """As Markdown. A metric without advice has an empty cell; a test says so."""
    from kvferry.connector.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS

    rows = ["| metric | kind | meaning | do |", "| --- | --- | --- | --- |"]
    for counter in COUNTERS.values():
        label = f"{{{counter.label}}}" if counter.label else ""
        values = f" {counter.label}: {', '.join(counter.values)}." if counter.values else ""
        rows.append(_row(counter.exported, f"_total{label}", "counter", f"{counter.doc}{values}"))
    rows += [_row(gauge.exported, "", "gauge", gauge.doc) for gauge in GAUGES.values()]
    rows += [_row(histogram.exported, "", "histogram", histogram.doc) for histogram in HISTOGRAMS.values()]
    return "\n".join(rows)


def _row(name: str, ending: str, kind: str, meaning: str) -> str:
    return f"| `vllm:{name}{ending}` | {kind} | {meaning} | {ADVICE.get(name, '')} |"
