"""Runs tests of this tier in its environment, within a time, whatever happens:

    .venv/bin/python -m tests.gpu_emulation.run [pytest's arguments]

Without arguments all cases, one after the other. The exit status is pytest's, 124 if the time was over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.gpu_emulation import build
from tests.processes import has_processes

CASES = "tests/gpu_emulation/cases"
ALL_S = 3600.0
TIME_IS_OVER = 124
STOP_S = 20.0


def run(arguments: Sequence[str], timeout_s: float) -> int:
    """Run pytest with these arguments in a session of its own; afterwards none of its processes is left."""
    python = build.ENVIRONMENT / "bin" / "python"
    command = (str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    # A case that stands still is ended with its stack, before the time of all is over.
    options = (
        "-o",
        f"faulthandler_timeout={timeout_s / 2:g}",
        "-o",
        "faulthandler_exit_on_timeout=true",
    )
    process = subprocess.Popen(
        [*command, *options], cwd=build.ROOT, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return TIME_IS_OVER
    finally:
        _end_all(process)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the session: first as engines end by themselves, then all the same."""
    for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        end_s = time.monotonic() + wait_s
        while time.monotonic() < end_s and has_processes(process.pid):
            process.poll()
            time.sleep(0.05)
    process.wait(STOP_S)


if __name__ == "__main__":
    build.build()
    sys.exit(run(sys.argv[1:] or [CASES, "--durations=0"], ALL_S))
