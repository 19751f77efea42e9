"""deploy/systemd: units that systemd understands, settings that kvferry's engines need."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.launches import SYSTEMD, unit

UNITS = sorted(SYSTEMD.glob("*.service"))


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    """With a program and a user that are here: systemd-analyze looks for both."""
    for path in UNITS:
        text = re.sub(
            r"^ExecStart=\S+",
            "ExecStart=/bin/true",
            path.read_text(),
            flags=re.MULTILINE,
        )
        (tmp_path / path.name).write_text(text.replace("User=kvferry", "User=root"))
    command = [
        "systemd-analyze",
        "verify",
        "--man=no",
        *(str(tmp_path / path.name) for path in UNITS),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", UNITS, ids=[path.name for path in UNITS])
def test_every_setting_that_a_unit_uses_is_in_its_example(path: Path) -> None:
    written = unit(path)
    example = (SYSTEMD / Path(written["EnvironmentFile"][0]).name).read_text()
    used = re.findall(r"\$\{?(\w+)\}?", written["ExecStart"][0])
    assert used
    for name in used:
        assert re.search(rf"^{name}=", example, re.MULTILINE), name
