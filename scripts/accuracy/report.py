"""The table at the end, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from scripts.accuracy.checks import Check
from scripts.console import show_results

_RESULTS = {True: "ok", False: "FAILED", None: "NOT RUN"}


@dataclass(slots=True)
class Report:
    """Results of one model's run: checks, and figures that are shown but not judged."""

    title: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> list[str]:
        """The checks that were not tried, each with the reason."""
        return [
            f"{check.name} ({check.detail})"
            for check in self.checks
            if check.passed is None
        ]

    @property
    def passed(self) -> bool:
        """Whether no check failed, and any was made."""
        return any(check.passed for check in self.checks) and all(
            check.passed is not False for check in self.checks
        )


def show(report: Report, file: TextIO | None = None) -> None:
    """Print the table."""
    rows = [
        (check.name, _RESULTS[check.passed], check.detail) for check in report.checks
    ]
    show_results(report.title, rows, report.figures, file)


def save(reports: Sequence[Report], path: Path) -> None:
    """The same for programs: `[{"title", "passed", "checks": [{"name", "passed", "detail"}], "figures": {…}}]`."""
    reported = [{**asdict(report), "passed": report.passed} for report in reports]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(reported, indent=1, ensure_ascii=False) + "\n")


def verdict(reports: Sequence[Report]) -> int:
    """Exit status: 0 when every model passed."""
    return 0 if reports and all(report.passed for report in reports) else 1
