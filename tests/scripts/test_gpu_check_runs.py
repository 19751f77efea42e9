"""The GPU check as a process: parts that hang, fail or are interrupted, and a real run of cheap parts on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.accuracy.settings import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

CHECK = """
import sys
from scripts.gpu_check import __main__ as check
from scripts.gpu_check.parts import Part

# A process in a session of its own, as an engine is, which does not listen to SIGTERM.
hang = "echo begun; trap '' TERM; setsid sleep 600 & echo $! >$PART/pid; trap - TERM; wait"
check.parts_for = lambda device, **_: [
    Part("hangs", hang, minutes=float(sys.argv[1]) / 60),
    Part("fails", "echo what went wrong; exit 7"),
    Part("good", "echo '{\\"a\\": 1}' >$PART/a.json; echo found"),
    Part("slow", "echo 'share  0.8  MISSED'; echo written", look="^.*MISSED$"),
    Part("wrong", "echo 'kvferry ended early'; echo written", fails="^kvferry.*"),
    Part("large", "exit 9", gpus=9),
]
sys.exit(check.main(sys.argv[2:]))
"""


@contextmanager
def checking(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "KVFERRY_DEVICE": "cpu",
        "LOG_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def report_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("gpu-check/*/report.json")
    report: dict[str, Any] = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text().startswith("# GPU check of kvferry")
    return report


def pid_in(folder: Path) -> int:
    """Of the child of the part that hangs."""
    wait_until(
        lambda: any(
            path.read_text().strip() for path in folder.glob("gpu-check/*/01/pid")
        ),
        "the part runs",
    )
    (path,) = folder.glob("gpu-check/*/01/pid")
    return int(path.read_text())


def test_a_part_that_hangs_is_ended_with_its_processes_and_the_others_run(
    tmp_path: Path,
) -> None:
    with checking(tmp_path, "-c", CHECK, "3") as running:
        pid = pid_in(tmp_path)
        said, _ = running.communicate(timeout=120)
    assert running.returncode == 1, said
    assert not psutil.pid_exists(pid)
    parts = {one["name"]: one for one in report_in(tmp_path)["parts"]}
    assert parts["good"]["results"] == {"a.json": {"a": 1}}
    found = {name: (one["mark"], one["found"]) for name, one in parts.items()}
    assert found == {
        "hangs": ("FAILED", "did not end by its deadline; last line: begun"),
        "fails": ("FAILED", "exit status 7: what went wrong"),
        "good": ("ok", "found"),
        "slow": ("look", "share 0.8 MISSED"),
        "wrong": ("FAILED", "kvferry ended early"),
        "large": ("skipped", "needs 9 GPUs with 2 GiB free; of 4 found, 4 have that"),
    }
    assert all(
        word in said for word in ("1/6 hangs", "FAILED in", "needs 9 GPUs", "report.md")
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_leaves_no_process_and_a_report_of_what_it_had(
    number: int, tmp_path: Path
) -> None:
    with checking(tmp_path, "-c", CHECK, "600") as running:
        pid = pid_in(tmp_path)
        running.send_signal(number)
        said, _ = running.communicate(timeout=120)
    assert running.returncode == 130, said
    assert not psutil.pid_exists(pid)
    assert [one["found"] for one in report_in(tmp_path)["parts"][:2]] == [
        "stopped while it ran",
        "stopped before it",
    ]


def test_the_cheap_parts_run_on_the_cpu_in_the_gpus_place(tmp_path: Path) -> None:
    wanted = [word for part in ("doctor", "CUDA", "reads") for word in ("--only", part)]
    with checking(tmp_path, "-m", "scripts.gpu_check", "--quick", *wanted) as running:
        said, _ = running.communicate(timeout=300)
    report = report_in(tmp_path)
    marks = {one["name"]: one["mark"] for one in report["parts"]}
    assert (running.returncode, marks) == (
        0,
        dict.fromkeys(["doctor", "CUDA's rules", "reads"], "ok"),
    ), said
    assert "every byte of" in report["parts"][2]["found"]
    assert not list((ROOT / "bench" / "results" / "quick").glob("reads*"))
