"""The wheel and the source distribution, built once, and the wheel installed into a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.outside import ROOT, Installed


@dataclass(frozen=True)
class Distributions:
    """The files that `python -m hatchling build` made."""

    wheel: Path
    source: Path


def build(folder: Path, into: Path, *targets: str) -> None:
    """Build a checkout without a network; the build backend is one of the tests' requirements."""
    chosen = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(into), *chosen]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both, of this checkout."""
    into = tmp_path_factory.mktemp("dist")
    build(ROOT, into, "sdist", "wheel")
    (wheel,), (source,) = into.glob("*.whl"), into.glob("*.tar.gz")
    return Distributions(wheel, source)


@pytest.fixture(scope="session")
def installed(
    distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """The wheel, installed by pip without a network."""
    return Installed.by_pip(distributions.wheel, tmp_path_factory.mktemp("installed"))
