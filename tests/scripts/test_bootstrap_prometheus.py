"""Prometheus out of a Debian package: into a folder of ours, or a reason why not; never a failed environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bootstrap
from scripts.bootstrap_prometheus import PROGRAMS, PrometheusError, fetch, missing
from tests.scripts.test_bootstrap import FakeEnvironment

_APT = """#!{python}
import pathlib, shutil, sys
if sys.argv[-2:] == ["download", "prometheus"]:
    shutil.copy({package!r}, pathlib.Path.cwd() / "prometheus_1.0_amd64.deb")
elif sys.argv[-1] != "update":
    sys.exit("unexpected: " + " ".join(sys.argv))
"""


def apt_with_package(folder: Path, programs: tuple[str, ...]) -> str:
    """A stand-in for apt-get that downloads a package as Debian's, with scripts for programs."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("NOT TESTED: dpkg-deb is not installed, so no Debian package can be made or read")
    tree = folder / "made"
    (tree / "usr" / "bin").mkdir(parents=True)
    for name in programs:
        (tree / "usr" / "bin" / name).write_text(f"#!/bin/sh\necho {name} runs\n")
        (tree / "usr" / "bin" / name).chmod(0o755)
    (tree / "DEBIAN").mkdir()
    described = "Package: prometheus\nVersion: 1.0\nArchitecture: amd64\nMaintainer: a <a@b.c>\nDescription: a\n"
    (tree / "DEBIAN" / "control").write_text(described)
    command = ["dpkg-deb", "--build", "--root-owner-group", str(tree), str(folder / "made.deb")]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return _APT.format(python=sys.executable, package=str(folder / "made.deb"))


def apt_is(monkeypatch: pytest.MonkeyPatch, folder: Path, apt: str) -> None:
    """Put a stand-in for apt-get before the real one."""
    folder.mkdir()
    (folder / "apt-get").write_text(apt)
    (folder / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_both_programs_are_taken_from_the_package_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    into = tmp_path / "bin"
    into.mkdir()
    apt_is(monkeypatch, tmp_path / "path", apt_with_package(tmp_path, PROGRAMS))
    fetch(into)
    assert missing(into) == []
    assert sorted(path.name for path in into.iterdir()) == sorted(PROGRAMS)
    for name in PROGRAMS:
        said = subprocess.run([into / name], capture_output=True, text=True, check=True, timeout=30).stdout
        assert said == f"{name} runs\n"


def test_a_package_without_one_of_them_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apt_is(monkeypatch, tmp_path / "path", apt_with_package(tmp_path, ("prometheus",)))
    with pytest.raises(PrometheusError, match="promtool"):
        fetch(tmp_path)


def test_apts_own_error_is_shown_when_it_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apt_is(monkeypatch, tmp_path / "path", "#!/bin/sh\necho 'E: no network here' >&2\nexit 100\n")
    with pytest.raises(PrometheusError, match="E: no network here"):
        fetch(tmp_path)


def test_without_apt_the_environment_is_made_all_the_same_and_says_what_will_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = FakeEnvironment(tmp_path, "2.13.0+cpu")
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(bootstrap, "missing", missing)
    bootstrap.make(environment, ["dev"])
    said = capsys.readouterr().out
    assert "NOT TO BE HAD: apt-get is not installed" in said
    assert "will skip" in said
    assert environment.asked == ["create", "dev.lock --no-deps --require-hashes", bootstrap.ROOT.name]


def test_programs_that_are_installed_are_not_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing(tmp_path / "elsewhere") == []
    monkeypatch.setenv("PATH", "")
    assert missing(tmp_path / "elsewhere") == list(PROGRAMS)
