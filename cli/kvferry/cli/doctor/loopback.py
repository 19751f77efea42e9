"""Runs the loopback transfer in processes of its own, with one deadline, and reads UCX's log of it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.cli.doctor.transfer import CONNECTING, READING, STARTING, TOO_LATE, Loopback, Read, read_log

_COMMAND = ("-m", "kvferry.cli.doctor.loopback_pair")
ERRORS = "errors"
_LAST_WORDS = 300
_NICE_S = 0.3


def run_loopback(environ: Mapping[str, str], timeout_s: float, command: Sequence[str] = _COMMAND) -> Loopback:
    """Make the transfer with these settings of UCX, and always end its processes.

    `command`: the arguments of Python that run the pair.
    """
    deadline = time.monotonic() + timeout_s
    reported = _Reported()
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        with _running(environ, Path(folder), command) as pair:
            failure = reported.listen(pair, deadline)
        errors = (Path(folder) / ERRORS).read_text(errors="replace")
        return Loopback(
            bindings=reported.bindings,
            reads=tuple(reported.reads),
            log=read_log(errors),
            files_per_peer=reported.files,
            no_cuda=reported.no_cuda,
            stage=reported.stage if failure else "",
            load_per_core=os.getloadavg()[0] / (os.cpu_count() or 1),
            failure=f"{failure}{_last_words(errors)}" if failure.endswith("ended") else failure,
        )


class _Reported:
    """The pair's reports so far."""

    def __init__(self) -> None:
        self.bindings = ""
        self.reads: list[Read] = []
        self.files: int | None = None
        self.no_cuda = ""
        self.stage = STARTING

    def listen(self, pair: subprocess.Popen[str], deadline: float) -> str:
        """Read reports until it is done, has failed or ended, or the deadline; returns the failure, else `""`."""
        try:
            for reported in _objects(pair, deadline):
                if "failed" in reported:
                    return str(reported["failed"])
                if "end" in reported:
                    return ""
                self._note(reported)
        except queue.Empty:
            return TOO_LATE
        return "its process ended"

    def _note(self, reported: Mapping[str, Any]) -> None:
        if "bindings" in reported:
            self.bindings, self.stage = reported["bindings"], CONNECTING
        elif "reading" in reported:
            self.stage = f"{READING} {reported['reading']}"
        elif "no_cuda" in reported:
            self.no_cuda = reported["no_cuda"]
        elif "files" in reported:
            self.files = reported["files"]
        elif "read" in reported:
            self.reads.append(Read(**reported["read"]))


@contextlib.contextmanager
def _running(environ: Mapping[str, str], folder: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Both processes in a session of their own, so that they can be killed together; UCX logs to a file, unbuffered."""
    added = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr", "UCX_WARN_UNUSED_ENV_VARS": "y"}
    # A second exporter of telemetry would take the engine's port.
    kept = {name: value for name, value in environ.items() if not name.startswith("NIXL_TELEMETRY_")}
    with (folder / ERRORS).open("wb") as errors:
        pair = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**kept, **added},
            start_new_session=True,
        )
    try:
        yield pair
    finally:
        # A finished pair ends by itself, so that agents are closed; one that hangs is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            pair.wait(timeout=_NICE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pair.pid, signal.SIGKILL)
        pair.wait()


def _objects(pair: subprocess.Popen[str], deadline: float) -> Iterator[dict[str, Any]]:
    """The pair's reports until it ends. Raises `queue.Empty` at the deadline."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def pump() -> None:
        if pair.stdout is not None:
            with pair.stdout:
                for line in pair.stdout:
                    lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
        with contextlib.suppress(ValueError):  # a library may print as well
            reported = json.loads(line)
            if isinstance(reported, dict):
                yield reported


def _last_words(errors: str) -> str:
    lines = [line for line in errors.strip().splitlines() if " UCX " not in line]
    return f": {lines[-1][-_LAST_WORDS:]}" if lines else ""
