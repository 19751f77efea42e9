"""deploy/systemd: units that systemd understands, settings that kvferry's engines need."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.launches import SYSTEMD, unit

UNITS = sorted(SYSTEMD.glob("*.service"))
a_unit = pytest.mark.parametrize("path", UNITS, ids=[path.name for path in UNITS])


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units with a program and a user that are here: systemd-analyze looks for both."""
    folder = tmp_path_factory.mktemp("units")
    for path in UNITS:
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE)
        (folder / path.name).write_text(text.replace("User=kvferry", "User=root"))
    return folder


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "verify", "--man=no", *(str(folder / path.name) for path in UNITS)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_systemd_understands_the_units(placed: Path) -> None:
    done = verify(placed)
    assert (done.returncode, done.stderr) == (0, "")


@a_unit
def test_a_unit_restarts_what_ended_by_itself_and_not_as_root(path: Path) -> None:
    written = unit(path)
    assert written["Restart"] == ["on-failure"]
    assert written["User"] == ["kvferry"]
    assert written["WantedBy"] == ["multi-user.target"]


@a_unit
def test_engines_may_lock_memory_and_are_asked_to_end_before_their_workers(path: Path) -> None:
    written = unit(path)
    if "router" not in path.name:
        assert written["LimitMEMLOCK"] == ["infinity"]
        assert written["KillMode"] == ["mixed"]
    assert int(written["LimitNOFILE"][0]) == 65536


@a_unit
def test_every_setting_that_a_unit_uses_is_in_its_example(path: Path) -> None:
    written = unit(path)
    example = (SYSTEMD / Path(written["EnvironmentFile"][0]).name).read_text()
    used = re.findall(r"\$\{?(\w+)\}?", written["ExecStart"][0])
    assert used
    for name in used:
        assert re.search(rf"^{name}=", example, re.MULTILINE), name
