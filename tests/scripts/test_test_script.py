"""`scripts/test.sh` without arguments, on small trees of tests with stand-ins for the checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "pyproject.toml",
    "scripts/test.sh",
    "scripts/find_python.sh",
    "tests/conftest.py",
)
HELPERS = ("tests/draws.py", "tests/seeds.py", "tests/waiting.py")
CHECKS = ("ruff", "mypy", "lint-imports")

PASSES = "def test_fine(): pass\n"
VARIES = """
import os, pytest
@pytest.mark.parametrize("pid", [os.getpid()])
def test_pid(pid): pass
"""
FAILS = "def test_broken(): assert False\n"
FAILS_AT_FIRST = """
import pathlib
def test_unsteady():
    been = pathlib.Path(__file__).with_suffix(".been")
    assert been.exists() or been.touch(), "not the first time"
"""
TELLS_ITS_WORKER = """
import os, pathlib
def test_where(): pathlib.Path(__file__).with_suffix(".worker").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""
DRAWS_AND_FAILS_AT_FIRST = """
import pathlib
from hypothesis import given, strategies as st
@given(st.integers())
def test_drawn(number):
    been = pathlib.Path(__file__).with_suffix(".been")
    assert been.exists() or been.touch(), "not the first time"
"""
IS_NOT_COLLECTED = "raise ValueError\n"
HANGS_WITH_THE_LOCK = (
    "import ctypes\ndef test_hangs(): ctypes.PyDLL(None).sleep(1000)\n"
)


class Tree:
    """A repository with nothing but the runner and a few tests."""

    def __init__(self, folder: Path, tests: dict[str, str]) -> None:
        self.folder = folder
        programs = folder / ".venv" / "bin"
        for name in (*COPIED, *HELPERS, *(f"tests/{name}.py" for name in tests)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name in (*COPIED, *HELPERS):
            shutil.copy(ROOT / name, folder / name)
        for name, text in tests.items():
            (folder / "tests" / f"{name}.py").write_text(text)
        (folder / "scripts" / "bootstrap.py").touch()
        fetch = folder / "scripts" / "fetch_prometheus.sh"
        fetch.write_text("#!/bin/sh\n")
        fetch.chmod(0o755)
        programs.mkdir(parents=True)
        self.program("python", f'exec {sys.executable} "$@"')
        for name in CHECKS:
            self.program(name, "exit 0")

    def program(self, name: str, does: str) -> None:
        """A stand-in."""
        path = self.folder / ".venv" / "bin" / name
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)

    def run(self, workers: int = 1) -> tuple[int, list[str]]:
        """Exit status, and the lines of the summary. A worker takes seconds to start: no more than needed."""
        script = self.folder / "scripts" / "test.sh"
        text, found = re.subn(
            r"\btests -n 4\b", f"tests -n {workers}", script.read_text()
        )
        assert found == 1
        script.write_text(text)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTEST_")
        }
        done = subprocess.run(
            ["bash", "scripts/test.sh"],
            cwd=self.folder,
            env={**inherited, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        before, summary, after = done.stdout.partition("\n== summary\n")
        assert summary, done.stdout + done.stderr
        print(before, done.stderr)
        return done.returncode, after.splitlines()


def test_one_that_fails_beside_others_and_passes_alone_is_named_and_fails_nothing(
    tmp_path: Path,
) -> None:
    engines = dict.fromkeys(("vllm/test_one", "vllm/test_two"), TELLS_ITS_WORKER)
    tree = Tree(tmp_path, {"test_odd": FAILS_AT_FIRST, "test_good": PASSES, **engines})
    status, (unsteady, checks, _, totals) = tree.run(workers=2)
    assert status == 0
    assert (
        unsteady
        == "UNSTEADY tests/test_odd.py::test_unsteady failed beside other tests and passed alone"
    )
    assert checks == "all checks passed"
    assert totals.startswith("1 failed beside others and passed alone, 3 passed in ")
    workers = [(tmp_path / "tests" / f"{name}.worker").read_text() for name in engines]
    assert len(set(workers)) == 1, "their modules share engines"


def test_one_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    status, summary = Tree(tmp_path, {"test_bad": FAILS, "test_good": PASSES}).run()
    assert status == 1
    assert summary[0] == "FAILED tests/test_bad.py::test_broken"
    assert summary[-1].startswith("1 failed, 1 passed in ")


def test_one_that_draws_fails_the_run_although_it_passes_alone(tmp_path: Path) -> None:
    """What it drew is seldom drawn again, so that it passes says nothing."""
    tree = Tree(
        tmp_path,
        {
            "test_life": DRAWS_AND_FAILS_AT_FIRST,
            "test_odd": FAILS_AT_FIRST,
            "test_good": PASSES,
        },
    )
    status, summary = tree.run()
    failed, unsteady, drawn, checks, _, seed, totals = summary
    assert status == 1
    assert failed == "FAILED tests/test_life.py::test_drawn"
    assert unsteady.startswith("UNSTEADY tests/test_odd.py::test_unsteady ")
    assert drawn.startswith(
        "DRAWN tests/test_life.py::test_drawn: the same again by KVFERRY_SEED="
    )
    assert checks == "all checks passed"
    assert seed.removeprefix("drawn with ") == drawn.rpartition(" ")[2]
    assert totals.startswith("2 failed, 1 passed in ")


@pytest.mark.parametrize(
    ("more", "named", "workers"),
    [
        (
            {f"test_odd{number}": FAILS_AT_FIRST for number in range(4)},
            "tests/test_odd3.py::test_unsteady",
            1,
        ),
        ({"test_broken": IS_NOT_COLLECTED}, "tests/test_broken.py", 1),
        ({"test_varies": VARIES}, "gw", 2),
        ({"test_hangs": HANGS_WITH_THE_LOCK}, "tests/test_hangs.py::test_hangs", 1),
    ],
    ids=[
        "more than three",
        "a module that is not collected",
        "workers that collect other tests",
        "a hang",
    ],
)
def test_there_is_no_second_run_where_it_would_hide_something(
    more: dict[str, str], named: str, workers: int, tmp_path: Path
) -> None:
    tree = Tree(tmp_path, {"test_good": PASSES, **more})
    script = tmp_path / "scripts" / "test.sh"
    script.write_text(
        re.sub(r"(?<=faulthandler_timeout=)600\b", "5", script.read_text())
    )
    status, summary = tree.run(workers)
    assert status == 1
    assert any(line.startswith(f"FAILED {named}") for line in summary)
    assert not any(line.startswith("UNSTEADY") for line in summary)
