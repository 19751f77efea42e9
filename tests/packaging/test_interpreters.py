"""The core under the oldest and the newest Python that pyproject.toml names: the wheel in an environment of its own.

The worker and the connector need torch and vLLM, which are here for one Python only: `test_python_versions.py` reads
their sources. Left out are long searches by hypothesis, times, and tests that make NIXL agents.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.draws import usual_cases
from tests.packaging.conftest import Distributions
from tests.packaging.outside import ROOT, pins
from tests.packaging.test_python_versions import NEWEST, OLDEST

pytestmark = [pytest.mark.slow, usual_cases(1)]

OTHERS = [
    "{}.{}".format(*version)
    for version in (OLDEST, NEWEST)
    if version != sys.version_info[:2]
]
NEEDED = ("hypothesis", "msgspec", "numpy", "pytest", "pyzmq", "rich")
"""All that the core and its tests import; torch and nixl have gigabytes of their own."""
UNLOCKED = "3.10"
"""The locks are for newer Pythons."""


def find(version: str) -> str:
    """A Python of this version that makes environments, on the PATH or where pyenv builds them; else a skip."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    built = map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))
    candidates: list[str | None] = [shutil.which(f"python{version}"), *built]
    asked = "import sys, venv, ensurepip; print('{}.{}'.format(*sys.version_info))"
    for path in filter(None, candidates):
        done = subprocess.run(
            [path, "-c", asked], capture_output=True, text=True, check=False, timeout=60
        )
        if done.stdout.strip() == version:
            return path
    pytest.skip(
        f"NOT TESTED: Python {version} is not installed (looked on the PATH and in ~/.pyenv)"
    )


@dataclass(frozen=True)
class Foreign:
    """An environment of another Python."""

    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A program of it, in the checkout; nothing of the checkout's packages can be imported."""
        environ = {
            name: value
            for name, value in os.environ.items()
            if not re.match("PYTHON|COVERAGE|PYTEST", name)
        }
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )


@pytest.fixture(scope="module", params=OTHERS)
def foreign(
    request: pytest.FixtureRequest,
    distributions: Distributions,
    tmp_path_factory: pytest.TempPathFactory,
) -> Foreign:
    """With the wheel, and what it needs from the package index at the versions of the locks, where they fit."""
    made = Foreign(tmp_path_factory.mktemp("foreign"))
    subprocess.run(
        [find(request.param), "-m", "venv", made.folder], check=True, timeout=120
    )
    constraints = made.folder / "constraints.txt"
    locked = {} if request.param == UNLOCKED else {**pins("cpu"), **pins("dev")}
    constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in locked.items()))
    done = made.run(
        "python", "-m", "pip", "install", "--quiet", "-c", str(constraints), *NEEDED
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1][:300]
        pytest.skip(
            f"NOT TESTED on Python {request.param}: pip could not install its needs: {last}"
        )
    done = made.run(
        "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(distributions.wheel),
    )
    assert done.returncode == 0, done.stderr
    return made


def test_the_commands_of_the_wheel_run(foreign: Foreign) -> None:
    where = foreign.run(
        "python", "-c", "import kvferry.protocol; print(kvferry.protocol.__file__)"
    ).stdout.strip()
    assert Path(where).is_relative_to(foreign.folder)
    assert foreign.run("kvferry", "--version").stdout.startswith("kvferry ")
    planned = foreign.run(
        "kvferry",
        "plan",
        "layers=4,heads=8,dim=64,tp=2",
        "layers=4,heads=8,dim=64,tp=3",
    )
    assert (planned.returncode, planned.stderr) == (0, "")


def test_the_cores_tests_pass(foreign: Foreign) -> None:
    chosen = "not properties and not hostile"
    done = foreign.run(
        "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
        "tests/protocol",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 200
