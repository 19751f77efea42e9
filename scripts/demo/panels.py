"""The dashboard as a table: what its panels show at this moment."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from scripts.dashboard_parts import Query, Row

Ask = Callable[[str], Sequence[tuple[Mapping[str, str], float]]]
"""A query → its series: labels and value."""

_MOST_SERIES = 4
_UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "ops": "/s"}
_LARGE = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def dashboard_table(rows: Sequence[Row], ask: Ask) -> tuple[Table, int, int]:
    """A line for every panel that has data.

    Returns:
        The table, how many panels have data, and how many there are.
    """
    table = Table("", "panel", "now", title="deploy/grafana/kvferry.json, panel by panel")
    shown = 0
    for row in rows:
        heading = row.title
        for panel in row.panels:
            said = [text for query in panel.queries for text in _said(query, panel.unit, ask)]
            if said:
                more = f" … {len(said) - _MOST_SERIES} more" if len(said) > _MOST_SERIES else ""
                table.add_row(heading, panel.title, ", ".join(said[:_MOST_SERIES]) + more)
                heading = ""
                shown += 1
        table.add_section()
    return table, shown, sum(len(row.panels) for row in rows)


def _said(query: Query, unit: str, ask: Ask) -> list[str]:
    found = [(labels, value) for labels, value in ask(query.expr) if value]
    return [f"{legend(query.legend, labels)} {shown(value, unit)}" for labels, value in found]


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
