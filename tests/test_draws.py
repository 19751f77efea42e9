"""Which cases of parametrized tests a run has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.draws import VARIABLE, draw
from tests.seeds import VARIABLE as SEED

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.draws import leave_cases_out
def pytest_configure(config): config.addinivalue_line("markers", "usual_cases(count): x")
def pytest_collection_modifyitems(config, items): leave_cases_out(config, items)
"""
TESTS = """
import pytest
from tests.draws import usual_cases
cases = pytest.mark.parametrize("case", "abcdef")
@usual_cases(2)
@cases
def test_some(case): pass
@usual_cases(2)
@cases
def test_same(case): pass
@usual_cases(0)
def test_nightly(): pass
def test_always(): pass
"""
ALWAYS = {"test_always"}
ALL = {f"test_{name}[{case}]" for name in ("some", "same") for case in "abcdef"}
ALL |= {"test_nightly", *ALWAYS}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(TESTS)
    return tmp_path


def collected(tree: Path, seed: int, test: str = "", **environment: str) -> set[str]:
    """The names of the tests of a run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, f"test_cases.py{test}"]
    without = {key: value for key, value in os.environ.items() if key != VARIABLE}
    given = {**without, "PYTHONPATH": str(ROOT), SEED: str(seed), **environment}
    done = subprocess.run(
        command, cwd=tree, env=given, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    return {line.partition("::")[2] for line in lines if "::" in line}


def test_a_run_has_as_many_cases_as_it_draws_and_tests_of_a_module_the_same(
    tree: Path,
) -> None:
    found = collected(tree, 1)
    cases = {name: test for test in found for name in [test.partition("[")[2]] if name}
    assert len(cases) == 2
    drawn = {f"test_{name}[{case}" for name in ("some", "same") for case in cases}
    assert found == ALWAYS | drawn


def test_every_case_is_drawn_by_some_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()
    for seed in range(30):
        monkeypatch.setenv(SEED, str(seed))
        drawn = draw("abcdef", 2, "a module")
        assert len(drawn) == 2
        found |= drawn
    assert found == set("abcdef")


def test_a_full_run_and_one_of_named_tests_leave_nothing_out(tree: Path) -> None:
    assert collected(tree, 1, **{VARIABLE: "1"}) == ALL
    assert collected(tree, 1, "::test_nightly") == {"test_nightly"}
