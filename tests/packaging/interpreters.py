"""Other Pythons than the one that runs the tests, and environments of them with the wheel and the tests' tools."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.outside import ROOT, pins

NEEDED = ("hypothesis", "msgspec", "numpy", "pytest", "pyzmq", "rich")
"""All that the core and its tests import; torch and nixl have gigabytes of their own."""
LOCKED_SINCE = (3, 11)


def candidates(version: tuple[int, int]) -> Iterator[str]:
    """Where a Python may be: on the PATH, and where pyenv builds them."""
    name = "python{}.{}".format(*version)
    if found := shutil.which(name):
        yield found
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from map(str, sorted(versions.glob("{}.{}.*/bin/python".format(*version)), reverse=True))


def find(version: tuple[int, int]) -> str:
    """A Python of this version that makes environments, or a skip that says which one is missing."""
    asked = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    for path in candidates(version):
        done = subprocess.run([path, "-c", asked], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode == 0 and done.stdout.split() == [str(part) for part in version]:
            return path
    pytest.skip("NOT TESTED: Python {}.{} is not installed (looked on the PATH and in ~/.pyenv)".format(*version))


@dataclass(frozen=True)
class Foreign:
    """An environment of another Python."""

    folder: Path

    @classmethod
    def make(cls, version: tuple[int, int], wheel: Path, folder: Path) -> Foreign:
        """With the wheel, and what it needs from the package index at the versions of the locks, where they fit."""
        subprocess.run([find(version), "-m", "venv", str(folder)], check=True, timeout=120)
        made = cls(folder)
        constraints = folder / "constraints.txt"
        wanted = {**pins("cpu"), **pins("dev")} if version >= LOCKED_SINCE else {}
        constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in wanted.items()))
        done = made.run("python", "-m", "pip", "install", "--quiet", "-c", str(constraints), *NEEDED)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1][:300]
            pytest.skip("NOT TESTED on Python {}.{}: pip could not install its needs: {}".format(*version, last))
        done = made.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
        assert done.returncode == 0, done.stderr
        return made

    def run(self, program: str, *arguments: str, timeout_s: float = 1800.0) -> subprocess.CompletedProcess[str]:
        """A program of it, in the checkout; nothing of the checkout's packages can be imported."""
        environ = {name: value for name, value in os.environ.items() if not re.match("PYTHON|COVERAGE|PYTEST", name)}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=timeout_s
        )
