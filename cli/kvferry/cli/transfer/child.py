"""A command's end of its child processes, which use NIXL, and the measurement by a reader."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvferry.cli.transfer.messages import (
    CaseProgress,
    Failed,
    Measured,
    Message,
    ReadsFailed,
    Task,
    receive,
    send,
)

COMMAND = ("-m", "kvferry.cli.transfer.process")
LOADING = "loading NIXL"
# For loading NIXL, also on a busy machine.
START_S = 120.0
# Added to the timeout of a read before the reader counts as hanging: it compares bytes in between.
_GRACE_S = 10.0
# `wait` is called as often.
_POLL_S = 0.25
# Time for a child to end by itself before it is killed: once its pipe is closed here, and there. Its status says why.
_ENDING_S = 0.3
_LEAVING_S = 2.0
_KILLED_S = 5.0
_MAX_LAST_LINE = 300
# Its log names the transports, the version and the variables that it does not know.
_UCX_LOG = {
    "UCX_LOG_LEVEL": "info",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "y",
}
_LANES = re.compile(r"(?:intra|inter)-node cfg#[0-9]+ +(.*)")
_ERROR = re.compile(r" UCX +ERROR +(.+)")


def check_installed() -> None:
    """Check that the children can import what only the extra `worker` installs.

    Raises:
        ReadsFailed: torch or NIXL is missing.
    """
    missing = [name for name in ("torch", "nixl") if not importlib.util.find_spec(name)]
    if missing:
        raise ReadsFailed(
            f"not installed: {', '.join(missing)}; pip install 'kvferry[worker]'"
        )


class Child:
    """A Python process that lives until `close`.

    It is in a session of its own, so that Ctrl-C does not reach it and its whole group can be killed. What UCX and
    other libraries print goes to an unnamed temporary file, and so never into its messages.

    Args:
        command: the arguments of Python; the pipe's file number is added to them.
        environ: its environment.
    """

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        # A second exporter of NIXL's own telemetry would take an engine's port.
        child_environ = {
            name: value
            for name, value in environ.items()
            if not name.startswith("NIXL_TELEMETRY_")
        }
        self._pipe, child_end = multiprocessing.Pipe()
        self._printed = tempfile.TemporaryFile(prefix="kvferry-")  # noqa: SIM115 - until `close`
        # Closed here, so that the pipe ends when the child does.
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, *command, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env={**child_environ, **_UCX_LOG},
                start_new_session=True,
            )
        # Also if the thread that waits for it is given up.
        atexit.register(self._kill)

    def send(self, task: Task) -> None:
        """Send its task; ignored if the child is gone, which `take` reports."""
        with contextlib.suppress(OSError):
            send(self._pipe, task)

    def take(self, timeout_s: float = 0.0) -> Message | None:
        """The child's next message; None if none arrives in time.

        Raises:
            ReadsFailed: the child has failed or ended.
        """
        message = None
        try:
            if self._pipe.poll(timeout_s):
                message = receive(self._pipe)
        except (EOFError, OSError):
            self._end(_LEAVING_S)
            status = self._process.returncode
            how = f"status {status}"
            if status is not None and status < 0:
                how = f"signal {-status}"
            last_words = self._last_error() or self._last_line()
            raise ReadsFailed(
                f"its NIXL process ended with {how}{last_words}"
            ) from None
        if isinstance(message, Failed):
            raise ReadsFailed(
                f"{message.reason}{self._last_error()}", late=message.late
            )
        return message

    def transports(self) -> str:
        """The transports to its peer, as UCX names them; empty without a connection."""
        configurations = _LANES.findall(self.printed())
        if not configurations:
            return ""
        return " ".join(configurations[-1].replace("/memory", "").split())

    def printed(self) -> str:
        """Its output so far, with UCX's log at level info."""
        # The child shares the file's offset: `seek` would move where it writes.
        return os.pread(self._printed.fileno(), 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        """Let it end by itself, so that its agent is closed; kill it after a short time. Idempotent."""
        self._pipe.close()
        self._end(_ENDING_S)
        self._printed.close()
        atexit.unregister(self._kill)

    def _end(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._kill()
        # In a driver's call not even a signal ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)

    def _kill(self) -> None:
        # Without a return code it is not reaped yet, so the id is still its own.
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_line(self) -> str:
        lines = [line for line in self.printed().splitlines() if " UCX  " not in line]
        return "".join(f": {line.strip()[-_MAX_LAST_LINE:]}" for line in lines[-1:])

    def _last_error(self) -> str:
        errors = _ERROR.findall(self.printed())
        return "".join(f"; UCX says: {error.strip()}" for error in errors[-1:])


def measure(reader: Child, task: Task, wait: Callable[[str, float], None]) -> Measured:
    """Let a reader read what the task offers.

    Args:
        wait: called several times a second with what the reader does, and the seconds since it has last said so; may
            raise.

    Raises:
        ReadsFailed: the reader failed, ended or hangs.
    """
    reader.send(task)
    doing = LOADING
    # Loading NIXL has a deadline of its own: on a busy machine it takes longer than any read.
    patience_s = START_S
    heard_s = time.monotonic()
    while True:
        message = reader.take(_POLL_S)
        if isinstance(message, Measured):
            return msgspec.structs.replace(message, transports=reader.transports())
        if isinstance(message, CaseProgress):
            doing = message.what
            patience_s = task.timeout_s + _GRACE_S
            heard_s = time.monotonic()
        silent_s = time.monotonic() - heard_s
        if silent_s > patience_s:
            raise ReadsFailed(f"NIXL hangs: no result for {silent_s:.0f} s", late=True)
        wait(doing, silent_s)
