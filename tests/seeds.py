"""One seed a run, `KVFERRY_SEED`: all that tests draw follows from it.

What a seed found, only that seed finds again. A second run of a failed test used to draw another one, and passed: that
hid a fault that stopped a decoder for good. So a second run has the first one's seed, and the failure of a test that
draws counts whatever the second run says (`scripts/test.sh`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator

import pytest

VARIABLE = "KVFERRY_SEED"
FAILURES_FILE = "kvferry/drawn_failures"
"""In pytest's cache, in the form of its own `cache/lastfailed`."""
_OPTION = "--hypothesis-seed"
_MARK = "draws"


def choose_seed(config: pytest.Config) -> None:
    """Choose the run's seed: the one that is given, else any. Hypothesis, this process's children and the workers of
    pytest-xdist take it too."""
    given = config.getoption(_OPTION, None) or os.environ.get(VARIABLE)
    seed = int(given) if given else secrets.randbits(32)
    os.environ[VARIABLE] = str(seed)
    config.option.hypothesis_seed = str(seed)


def seed_of_this_run() -> int:
    """The seed that `choose_seed` chose."""
    return int(os.environ[VARIABLE])


class DrawnFailures:
    """A plugin of pytest: which of the failed tests draw, and how each is drawn again.

    A test draws if hypothesis runs it, or if it asks for the fixture `run_seed`.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, bool] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark the tests that draw: a mark reaches the process that collects the reports."""
        for item in items:
            is_of_hypothesis = getattr(
                getattr(item, "obj", None), "is_hypothesis_test", False
            )
            if is_of_hypothesis or "run_seed" in getattr(item, "fixturenames", ()):
                item.add_marker(_MARK)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Say in the report of a failure how to draw the same."""
        report = yield
        if report.failed and _MARK in report.keywords:
            again = (
                f"{VARIABLE}={seed_of_this_run()} python -m pytest '{report.nodeid}'"
            )
            report.sections.append(("draws the same again", again))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """With several workers, their reports come here in the process that started them."""
        if report.failed and _MARK in report.keywords:
            self._failed[report.nodeid] = True

    def pytest_sessionfinish(self) -> None:
        """Leave the names for scripts/test.sh."""
        cache = getattr(self._config, "cache", None)  # pytest may run without one
        if cache is not None and not hasattr(self._config, "workerinput"):
            cache.set(FAILURES_FILE, self._failed)
