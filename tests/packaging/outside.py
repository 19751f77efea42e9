"""Running an installed kvferry so that nothing of the checkout can be imported by mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "protocol",
    "plan",
    "trace",
    "link",
    "scheduler",
    "worker",
    "connector",
    "cli",
)
REQUIREMENTS = ROOT / "requirements"


def pins(lock: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name → version in `requirements/LOCK.lock`, as far as its markers fit this environment, or the given one."""
    lines = (REQUIREMENTS / f"{lock}.lock").read_text().splitlines()
    found = [
        Requirement(line.rstrip(" \\"))
        for line in lines
        if not line.startswith(("#", " "))
    ]
    fits = [
        one
        for one in found
        if one.marker is None or one.marker.evaluate(dict(environment or {}))
    ]
    return {one.name: str(one.specifier).removeprefix("==") for one in fits}


def closure(needs: Iterable[str]) -> dict[str, Distribution]:
    """The installed distributions that requirements need, with what these need; extras are left out."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(need) for need in needs]
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if name not in found and (
            need.marker is None or need.marker.evaluate({"extra": ""})
        ):
            found[name] = distribution(need.name)
            waiting += map(Requirement, found[name].requires or ())
    return found


def link(distributions: Iterable[Distribution], folder: Path) -> Path:
    """Make a folder of links to the modules of these distributions."""
    for one in distributions:
        for name in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            (folder / name).symlink_to(str(one.locate_file(name)))
    return folder


@dataclass(frozen=True)
class Installed:
    """A folder into which pip installed kvferry. `libraries`: the folder of the packages that it needs."""

    folder: Path
    libraries: Path = Path(str(distribution("numpy").locate_file("")))

    @classmethod
    def by_pip(cls, distribution: Path, folder: Path) -> Installed:
        """Install it without its dependencies, which are those of the environment that runs the tests."""
        options = (
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            str(folder),
        )
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, str(distribution)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return cls(folder)

    def python(self, *arguments: str, expected: int = 0, timeout_s: float = 120) -> str:
        """Run Python in another folder; gives its standard output.

        `-S` leaves out the `.pth` files, and with them the editable installation, whose `kvferry.*` would stand in for
        whatever the wheel lacks: a namespace package is looked for in every place.
        """
        return self._run(arguments, expected, timeout_s).stdout

    def failure(self, *arguments: str, expected: int) -> str:
        """As `python`; gives the standard error."""
        return self._run(arguments, expected, 120).stderr

    def _run(
        self, arguments: Sequence[str], expected: int, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "COVERAGE"))
        }
        environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(self.libraries)])
        command = [sys.executable, "-S", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder.parent,
            env=environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == expected, done.stdout + done.stderr
        return done
