"""The core's sources suit what pyproject.toml promises, from Python 3.10 to 3.13, in their syntax and by the library.

`test_interpreters.py` runs them there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

from kvferry.cli.doctor.versions import (
    NEEDED,
    NEEDED_BY_WORKERS,
    PYTHON,
    PYTHON_OF_VLLM,
    VLLM,
)
from tests.packaging.outside import PACKAGES, ROOT

OLDEST, NEWEST = (3, 10), (3, 13)
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = tuple(package for package in PACKAGES if package != "connector")


CHECK_LIBRARY = f"""
[mypy]
namespace_packages = true
explicit_package_bases = true
ignore_missing_imports = true
mypy_path = {":".join(PACKAGES)}
# torch is not looked into: only the standard library matters here, and torch takes most of the time.
[mypy-torch.*,nixl.*,triton.*,vllm.*,rich.*]
follow_imports = skip
"""


def type_checked(
    python: tuple[int, int], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """By mypy, with the standard library as it is in this Python."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--python-version",
        ".".join(map(str, python)),
        *arguments,
    ]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("python", [OLDEST, NEWEST], ids=["oldest", "newest"])
def test_no_source_uses_syntax_or_a_part_of_the_library_that_the_oldest_or_the_newest_python_lacks(
    tmp_path: Path, python: tuple[int, int]
) -> None:
    config = tmp_path / "mypy.ini"
    config.write_text(CHECK_LIBRARY)
    done = type_checked(
        python, "--config-file", str(config), "--cache-dir", str(tmp_path), *CORE
    )
    assert done.returncode == 0, done.stdout


def test_the_declared_pythons_are_those_that_the_doctor_takes() -> None:
    declared = [
        (3, int(found[1]))
        for one in PROJECT["project"]["classifiers"]
        if (
            found := re.fullmatch(r"Programming Language :: Python :: 3\.([0-9]+)", one)
        )
    ]
    assert declared == [(3, minor) for minor in range(PYTHON[0][1], PYTHON[1][1] + 1)]
    assert PROJECT["project"]["requires-python"] == f">={OLDEST[0]}.{OLDEST[1]}"
    assert PYTHON[0] == OLDEST
    assert PYTHON[1] == NEWEST
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{OLDEST[0]}{OLDEST[1]}"
    assert PROJECT["tool"]["mypy"]["python_version"] == ".".join(
        map(str, PYTHON_OF_VLLM)
    )


def test_the_doctors_matrix_is_what_the_package_requires() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for written, wanted in (
        (PROJECT["project"]["dependencies"], NEEDED),
        (extras["worker"], NEEDED_BY_WORKERS),
    ):
        named = [one.partition(">=") for one in written]
        assert {name: sign + bounds for name, sign, bounds in named} == wanted
    assert extras["vllm"] == ["kvferry[worker]", f"vllm{VLLM}"]
