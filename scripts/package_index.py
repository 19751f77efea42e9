"""Queries of the package index through uv: versions that fit together, and the hashes of their files."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PLATFORM = "x86_64-manylinux_2_39"
"""glibc 2.39 is that of Ubuntu 24.04, the image's."""


class PackageIndexError(Exception):
    """No versions fit together, or a file is not there; the text has uv's own words."""


def resolve(wanted: Iterable[Requirement], python: str, kept: Mapping[str, str]) -> dict[str, str]:
    """Canonical name → version of all that is needed, from metadata only.

    Args:
        kept: versions to take wherever they fit.

    Raises:
        PackageIndexError: nothing fits.
    """
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "kept.txt"
        output.write_text("".join(f"{one}=={version}\n" for one, version in kept.items()))
        options = ["--no-annotate", "--no-header", "-o", str(output)]
        _compile(python, [str(one) for one in wanted], options)
        lines = [line for line in output.read_text().splitlines() if line]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1].split()[0] for line in lines}


def file_hashes(pins: Mapping[str, str], pythons: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Of every wheel that one of these Pythons can install; of the source distribution where there is no such wheel.

    Raises:
        PackageIndexError: a package has neither.
    """
    wheels: dict[str, set[str]] = {name: set() for name in pins}
    sources: dict[str, set[str]] = {name: set() for name in pins}
    for python in pythons:
        for package in _files(pins, python):
            wheels[package["name"]] |= {_sha256(file) for file in package.get("wheels", ())}
            if "sdist" in package:
                sources[package["name"]].add(_sha256(package["sdist"]))
    found = {name: tuple(sorted(wheels[name] or sources[name])) for name in pins}
    if empty := sorted(name for name, hashes in found.items() if not hashes):
        raise PackageIndexError(f"no file for {', '.join(empty)}")
    return found


def _files(pins: Mapping[str, str], python: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "pylock.toml"
        wanted = [f"{one}=={version}" for one, version in pins.items()]
        _compile(python, wanted, ["--no-deps", "--format", "pylock.toml", "-o", str(output)])
        found: list[dict[str, Any]] = tomllib.loads(output.read_text())["packages"]
    return found


def _sha256(file: Mapping[str, Any]) -> str:
    return f"sha256:{file['hashes']['sha256']}"


def _compile(python: str, wanted: Iterable[str], options: Sequence[str]) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise PackageIndexError("uv is needed on the PATH: pip install uv")
    command = [uv, "pip", "compile", "--no-config", "--quiet", "--python-version", python]
    done = subprocess.run(
        [*command, "--python-platform", PLATFORM, *options, "-"],
        input="\n".join(wanted),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise PackageIndexError(f"Python {python}: {done.stderr.strip()}")
