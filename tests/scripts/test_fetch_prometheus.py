"""Prometheus out of a Debian package: into a folder of ours, or a line that says what will be missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bootstrap import ROOT

_APT = """#!{python}
import pathlib, shutil, sys
if sys.argv[-2:] == ["download", "prometheus"]:
    shutil.copy({package!r}, pathlib.Path.cwd() / "prometheus_1.0_amd64.deb")
"""
NEEDED = ("bash", "realpath", "mktemp", "rm", "mkdir", "mv", "timeout", "dpkg-deb", "tar", "sh")


def path_of(folder: Path, apt: str) -> Path:
    """A folder for PATH with the tools that are needed, no Prometheus, and a stand-in for apt-get."""
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"NOT TESTED: {name} is not installed, so no Debian package can be made or read")
        (folder / name).symlink_to(found)
    (folder / "apt-get").write_text(apt)
    (folder / "apt-get").chmod(0o755)
    return folder


def fetch(path: Path, into: Path) -> str:
    """Run the script, which never fails; its output."""
    into.mkdir(exist_ok=True)
    script = ROOT / "scripts" / "fetch_prometheus.sh"
    done = subprocess.run(
        [script, into], env={"PATH": str(path)}, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_both_programs_are_taken_from_the_package_once(tmp_path: Path) -> None:
    tree = tmp_path / "made"
    (tree / "usr" / "bin").mkdir(parents=True)
    for name in ("prometheus", "promtool"):
        (tree / "usr" / "bin" / name).write_text("#!/bin/sh\n")
        (tree / "usr" / "bin" / name).chmod(0o755)
    (tree / "DEBIAN").mkdir()
    described = "Package: prometheus\nVersion: 1.0\nArchitecture: amd64\nMaintainer: a <a@b.c>\nDescription: a\n"
    (tree / "DEBIAN" / "control").write_text(described)
    path = path_of(tmp_path / "path", _APT.format(python=sys.executable, package=str(tmp_path / "made.deb")))
    subprocess.run(["dpkg-deb", "--build", tree, tmp_path / "made.deb"], check=True, capture_output=True, timeout=30)
    assert "NOT TO BE HAD" not in fetch(path, tmp_path / "bin")
    assert {each.name for each in (tmp_path / "bin").iterdir()} == {"prometheus", "promtool"}
    (path / "apt-get").write_text("#!/bin/sh\necho asked again\n")
    assert fetch(path, tmp_path / "bin") == ""


def test_where_it_cannot_be_had_a_line_names_the_consequence_and_nothing_fails(tmp_path: Path) -> None:
    path = path_of(tmp_path / "path", "#!/bin/sh\nexit 100\n")
    assert "tests that need a real Prometheus will skip" in fetch(path, tmp_path / "bin")
