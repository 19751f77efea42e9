"""The table at the end, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.accuracy.checks import Check

_MARKS = {True: "[green]ok[/]", False: "[bold red]FAILED[/]", None: "[bold yellow]NOT RUN[/]"}


@dataclass(slots=True)
class Report:
    """Results of one model's run: checks, and figures that are shown but not judged."""

    title: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> list[str]:
        """The checks that were not tried, each with the reason."""
        return [f"{check.name} ({check.detail})" for check in self.checks if check.passed is None]

    @property
    def passed(self) -> bool:
        """Whether no check failed, and any was made."""
        return any(check.passed for check in self.checks) and all(check.passed is not False for check in self.checks)


def show(report: Report, console: Console) -> None:
    """Print the table, for terminals of 80 columns as well."""
    table = Table(title=escape(report.title), title_justify="left", box=box.HORIZONTALS, padding=0, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in report.checks:
        table.add_row(escape(check.name), _MARKS[check.passed], escape(check.detail))
    table.add_section()
    for name, value in report.figures.items():
        table.add_row(escape(name), "", escape(value))
    console.print(table)


def save(reports: Sequence[Report], path: Path) -> None:
    """The same for programs: `[{"title", "passed", "checks": [{"name", "passed", "detail"}], "figures": {…}}]`."""
    reported = [{**asdict(report), "passed": report.passed} for report in reports]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(reported, indent=1, ensure_ascii=False) + "\n")


def verdict(reports: Sequence[Report]) -> int:
    """Exit status: 0 when every model passed."""
    return 0 if reports and all(report.passed for report in reports) else 1
