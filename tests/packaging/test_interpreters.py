"""The core under the oldest and the newest Python that pyproject.toml names: the wheel in an environment of its own.

The worker and the connector need torch and vLLM, which are here for one Python only: `test_python_versions.py` reads
their sources. Left out are long searches by hypothesis, times, and tests that make NIXL agents.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import Distributions
from tests.packaging.interpreters import Foreign
from tests.packaging.outside import ROOT
from tests.packaging.test_python_versions import NEWEST, OLDEST

pytestmark = pytest.mark.slow

OTHERS = [version for version in (OLDEST, NEWEST) if version != sys.version_info[:2]]
SUITES = ("tests/protocol",)
LEFT_OUT = ("properties", "hostile")


@pytest.fixture(scope="module", params=OTHERS, ids=["{}.{}".format(*version) for version in OTHERS])
def foreign(
    request: pytest.FixtureRequest, distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Foreign:
    return Foreign.make(request.param, distributions.wheel, tmp_path_factory.mktemp("foreign"))


def test_the_command_tells_its_version_and_plans(foreign: Foreign) -> None:
    assert foreign.run("kvferry", "--version").stdout.startswith("kvferry ")
    planned = foreign.run("kvferry", "plan", "layers=4,heads=8,dim=64,tp=2", "layers=4,heads=8,dim=64,tp=3")
    assert (planned.returncode, planned.stderr) == (0, "")


def test_what_is_tested_is_the_wheel(foreign: Foreign) -> None:
    where = foreign.run("python", "-c", "import kvferry.protocol; print(kvferry.protocol.__file__)").stdout.strip()
    assert Path(where).is_relative_to(foreign.folder)
    assert not Path(where).is_relative_to(ROOT)


def test_the_cores_tests_pass(foreign: Foreign) -> None:
    chosen = " and ".join(f"not {word}" for word in LEFT_OUT)
    done = foreign.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *SUITES)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 200
