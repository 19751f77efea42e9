"""Engines of vLLM's CUDA wheel on the emulated GPU. Nothing is collected where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver

IS_EMULATED = "tests.gpu_emulation.emulation.start" in sys.modules
collect_ignore_glob = [] if IS_EMULATED else ["test_*.py"]

if IS_EMULATED:
    forkserver.PRELOAD[:] = ["tests.gpu_emulation.preload"]

_ROWS: list[str] = []
_WORST = pytest.StashKey[float]()
_SETUP_S = pytest.StashKey[float]()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines log."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
def differs(request: pytest.FixtureRequest) -> Callable[[float], float]:
    """Notes by how much log-probabilities differed, for the table that the run ends with; returns it."""

    def note(worst: float) -> float:
        request.node.stash[_WORST] = worst
        return worst

    return note


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    if report.when == "setup":
        item.stash[_SETUP_S] = report.duration
    if report.when == "call":
        worst = item.stash.get(_WORST, None)
        shown = "–" if worst is None else f"{worst:.2g}"
        seconds = item.stash[_SETUP_S] + report.duration
        name = item.name.removeprefix("test_").replace("_", " ")
        _ROWS.append(f"| {name} | {report.outcome} | {seconds:.0f} | {shown} |")
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A table for the README."""
    if _ROWS:
        terminalreporter.write_line("| case | result | seconds | worst difference |")
        terminalreporter.write_line("| --- | --- | --- | --- |")
        for row in _ROWS:
            terminalreporter.write_line(row)
