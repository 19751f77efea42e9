"""Results of a benchmark: tables, charts and targets, in a form that `bench.report` draws without knowing them.

    Results(
        command="python -m bench.step",
        what="Time that a step takes of the engine's thread, beside the same step without a connector.",
        tables=(Table("Per step", ("leases", "p50, µs", "p99, µs"), ((1, 12.0, 31.0), (10_000, 12.4, 33.0))),),
        charts=(Chart("Growth", "leases", "µs", (Series("p99", (1, 10_000), (31.0, 33.0)),), x_log=True),),
        targets=(Target.at_most("step thread, p99", 33.0, 200.0, "µs"),),
    )

`publish` prints them and writes `results/NAME.json`, or `results/quick/NAME.json` if they cannot be published.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Printed

from bench.provenance import REPOSITORY, Checkout, checkout, circumstances

RESULTS = Path(
    os.environ.get("KVFERRY_BENCH_RESULTS") or REPOSITORY / "bench" / "results"
)
_LONGEST_LINE = 400
"""Characters of a JSON list or object that stays on one line."""

Cell = str | int | float | None
"""Of a table; None where nothing was measured."""


@dataclass(frozen=True)
class Table:
    """Figures side by side; units are in the columns' names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.title}: a row of {len(row)} cells under {len(self.columns)} columns: {row}"
                )


@dataclass(frozen=True)
class Series:
    """One line of a chart. `low` and `high` bound what was seen; `n`: samples of all places together."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    n: int | None = None

    def __post_init__(self) -> None:
        for given in (self.y, self.low, self.high):
            if given is not None and len(given) != len(self.x):
                raise ValueError(
                    f"{self.name}: {len(given)} values for {len(self.x)} places"
                )

    @classmethod
    def of_samples(
        cls, name: str, samples: Sequence[tuple[float, Sequence[float]]]
    ) -> Series:
        """Median and range of the samples at each place; places without samples are left out."""
        found = [(x, values) for x, values in samples if values]
        return cls(
            name,
            [x for x, _ in found],
            [statistics.median(values) for _, values in found],
            [min(values) for _, values in found],
            [max(values) for _, values in found],
            sum(len(values) for _, values in found),
        )


@dataclass(frozen=True)
class Chart:
    """Series on common axes; the labels give the units.

    Attributes:
        limit: a value that was promised, drawn across the chart.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    limit: float | None = None

    def of_medians(self) -> Chart:
        """The README's: without ranges, and so with a y axis from 0."""
        series = [replace(one, low=None, high=None) for one in self.series]
        return replace(
            self,
            title=self.title.replace("median and range", "medians"),
            series=series,
            y_log=False,
        )


@dataclass(frozen=True)
class Target:
    """A limit and the measured value; made by `at_most` and `at_least`. `note`: for a missed target, what was tried."""

    name: str
    measured: float
    limit: float
    unit: str
    kind: Literal["at most", "at least"]
    met: bool
    note: str = ""

    @classmethod
    def at_most(
        cls, name: str, measured: float, limit: float, unit: str, note: str = ""
    ) -> Target:
        """Met when `measured` <= `limit`; not met by a measurement that is no number."""
        return cls(
            name, measured, limit, unit, "at most", bool(measured <= limit), note
        )

    @classmethod
    def at_least(
        cls, name: str, measured: float, limit: float, unit: str, note: str = ""
    ) -> Target:
        """Met when `measured` >= `limit`; not met by a measurement that is no number."""
        return cls(
            name, measured, limit, unit, "at least", bool(measured >= limit), note
        )


@dataclass(frozen=True)
class Results:
    """One run in percentiles, ranges and counts; `quick` marks one that is too short to be published."""

    command: str
    what: str
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()
    quick: bool = False


def publish(name: str, results: Results, started: Checkout) -> Path:
    """Print the tables and targets, and write the JSON with the circumstances in front.

    A quick run goes to `results/quick/`, which git ignores: it does not overwrite what was measured with care. So does
    a run that was not at one clean commit from `started`, the working tree before it measured, until now.
    """
    print_results(results)
    ended = checkout()
    commit = str(started) if ended == started else f"{started}, at the end {ended}"
    problem = started.problem or (None if ended == started else f"it ran on {commit}")
    if problem and not results.quick:
        print(f"Not to be published: {problem}.")
    path = RESULTS / ("quick" if results.quick or problem else "") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json_text(_rounded({**circumstances(commit), **asdict(results)})) + "\n"
    )
    print(f"written to {path}", flush=True)
    return path


def print_results(results: Results) -> None:
    """Tables, then targets, then notes, for people."""
    console = Console(width=None if Console().is_terminal else 160)
    tables = list(results.tables)
    if results.targets:
        rows = [
            (
                x.name,
                x.measured,
                f"{x.kind} {shown(x.limit)}",
                x.unit,
                "met" if x.met else "MISSED",
                x.note,
            )
            for x in results.targets
        ]
        tables.append(
            Table("Targets", ("target", "measured", "limit", "unit", "", "note"), rows)
        )
    for table in tables:
        printed = Printed(
            title=escape(table.title), box=box.SIMPLE, title_justify="left"
        )
        for index, column in enumerate(table.columns):
            numbers = all(not isinstance(row[index], str) for row in table.rows)
            printed.add_column(escape(column), justify="right" if numbers else "left")
        for row in table.rows:
            printed.add_row(*(escape(shown(cell)) for cell in row))
        console.print(printed)
    for note in results.notes:
        console.print(f"- {note}", markup=False)
    if results.quick:
        console.print("A quick run: for orientation, not to be published.")


def shown(cell: Cell, digits: int = 4) -> str:
    """Numbers with so many digits, integers with all of them, thousands apart; `–` for what was not measured."""
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return "–"
    if isinstance(cell, float):
        cell = cell if abs(cell) >= 1000 else float(f"{cell:.{digits}g}")
        return (
            f"{cell:,.0f}" if abs(cell) >= 1000 or cell == round(cell) else f"{cell:g}"
        )
    return f"{cell:,}" if isinstance(cell, int) else cell


def shown_bytes(number: float) -> str:
    """With a unit."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << power:
            return f"{shown(number / (1 << power))} {unit}"
    return f"{shown(number)} B"


def spread(samples: Sequence[float], digits: int = 3) -> str:
    """The range of some samples, as `1.2 … 3.4`; `–` for none."""
    return (
        f"{shown(min(samples), digits)} … {shown(max(samples), digits)}"
        if samples
        else "–"
    )


def json_text(value: Any, indent: str = "") -> str:
    """JSON with a line for each row, series and target: short lists, and objects of lists, are not broken up."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, (dict, list)):
        return line
    members = value.values() if isinstance(value, dict) else value
    nested = dict if isinstance(value, dict) else (dict, list)
    if len(line) <= _LONGEST_LINE and not any(
        isinstance(member, nested) for member in members
    ):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [
            f"{inner}{json.dumps(name, ensure_ascii=False)}: {json_text(value[name], inner)}"
            for name in value
        ]
        return "\n".join(["{", ",\n".join(lines), f"{indent}}}"])
    return "\n".join(
        [
            "[",
            ",\n".join(inner + json_text(member, inner) for member in members),
            f"{indent}]",
        ]
    )


def _rounded(value: Any) -> Any:
    """Floats with four significant digits: a machine does not repeat more. What is no number is null in JSON."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
