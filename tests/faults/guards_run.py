"""Runs tests in a process of their own, with one guard off or with all on."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection

import pytest

from tests.faults.guards_off import VARIABLE
from tests.harness.children import Child

PASSED, BY_ASSERTION = "passed", "failed by assertion"
_TIMEOUT_S = 300.0
_IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""The process has vLLM already, and some of that has plugins of pytest."""


class Recorder:
    """A plugin of pytest.

    Attributes:
        outcomes: per test `PASSED`, `BY_ASSERTION`, or what else happened; of several the first.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None:
            expected = call.when == "call" and isinstance(
                call.excinfo.value, (AssertionError, pytest.fail.Exception)
            )
            text = (
                BY_ASSERTION
                if expected
                else f"{call.when}: {call.excinfo.type.__name__}: {call.excinfo.value}"
            )
            self.outcomes.setdefault(item.nodeid, text)
        elif call.when == "teardown":
            self.outcomes.setdefault(item.nodeid, PASSED)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = f"collection: {report.longreprtext}"


def outcomes(tests: Sequence[str], without: str = "") -> dict[str, str]:
    """Results of the tests in a process in which the guard of this key is off; see `Recorder`."""
    process = Child(_run, tuple(tests), without)
    try:
        found: dict[str, str] = process.receive(_TIMEOUT_S)
    except TimeoutError:
        return dict.fromkeys(tests, f"not over after {_TIMEOUT_S:g} s")
    except EOFError:
        return dict.fromkeys(tests, "its process has died")
    finally:
        process.kill()
    return found


def _run(answer: Connection, tests: tuple[str, ...], without: str) -> None:
    # What was there before the fork stays: a full collection looks at a million objects of vLLM's modules for half a
    # second, and pytest ends with two.
    gc.freeze()
    os.environ[VARIABLE] = without
    quiet = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(quiet, descriptor)
    recorder = Recorder()
    # Of a failure only its kind is used, and most of these tests fail.
    plain = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"]
    options = [*plain, "-p", "tests.faults.guards_off", "-W", _IMPORTED_BEFORE]
    code = pytest.main([*options, *tests], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        recorder.outcomes["pytest"] = f"exit code {code!r}"
    answer.send(recorder.outcomes)
