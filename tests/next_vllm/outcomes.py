"""A plugin of pytest: writes what became of each test to the file that `OUTCOMES_FILE` names, as JSON.

`{node id: {"outcome": "passed" | "failed" | "skipped", "error": last line of the error, "seconds": …}}`
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "OUTCOMES_FILE"
_NO_FILE = "no file for the outcomes"


class Outcomes:
    """What became of the tests so far."""

    def __init__(self) -> None:
        self.by_test: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has a report each for its fixtures, for itself and for the end of its fixtures: the worst counts."""
        found = self.by_test.setdefault(
            report.nodeid, {"outcome": "passed", "error": "", "seconds": 0.0}
        )
        found["seconds"] += report.duration
        if report.passed or found["outcome"] == "failed":
            return
        found["outcome"] = report.outcome
        found["error"] = _last_line(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported has no tests: the module stands for them."""
        if report.failed:
            self.by_test[report.nodeid] = {
                "outcome": "failed",
                "error": _last_line(report),
                "seconds": 0.0,
            }

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[VARIABLE]).write_text(json.dumps(self.by_test, indent=1))


def _last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What was raised, or why a test was skipped."""
    where = report.longrepr
    if isinstance(where, tuple):
        return str(where[2])
    crash = getattr(where, "reprcrash", None)
    text = str(getattr(crash, "message", "") or where)
    lines = [line for line in text.splitlines() if line.strip()]
    if crash is None:
        return lines[-1][:400] if lines else ""
    return lines[0][:400] if lines else ""


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist send their reports to the process that started them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(), "outcomes-of-next-vllm")
