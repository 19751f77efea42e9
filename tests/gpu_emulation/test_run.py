"""A run of the tier ends in its time, with all of its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_emulation import build
from tests.gpu_emulation.run import TIME_IS_OVER, run
from tests.processes import has_processes
from tests.waiting import wait_until

STANDS_STILL = """\
#!/bin/sh
trap '' TERM
sleep 1000 &
echo $$ > "$0.pid"
sleep 1000
"""


def test_what_stands_still_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STANDS_STILL)
    python.chmod(0o755)
    monkeypatch.setattr(build, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr("tests.gpu_emulation.run.STOP_S", 0.5)
    assert run([], 1.0) == TIME_IS_OVER
    group = int(Path(f"{python}.pid").read_text())
    wait_until(lambda: not has_processes(group), "all of its processes have ended")
