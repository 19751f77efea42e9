"""One server in a process group of its own, with its log; started, awaited and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

_POLL_S = 0.25
_TERM_S = 15.0
_TAIL_LINES = 40
_STEP = ": Iteration("


class ServerFailed(Exception):
    """A server ended, did not get ready in time or did not answer. The text has the end of its log."""


def tail(path: Path, lines: int = _TAIL_LINES, max_bytes: int = 256 << 10) -> str:
    """The last lines of a log, without those of every single step; a note when there are none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({error})"
    last = [line for line in text.splitlines() if _STEP not in line][-lines:]
    return "\n".join(last) if last else "(the log is empty)"


class Server:
    """A server process: a name for the messages, a command, a log.

    It is a context manager: `with server: server.wait_ready()`. Leaving it stops the whole process group, and nothing
    else. `start`, `wait_ready` and `stop` do the same by hand; several can be started before the first is awaited.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        base_url: str,
        log_path: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.base_url = base_url
        self.log_path = log_path
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the first process of the group. Raises `ServerFailed` when it was not started."""
        if self._process is None:
            raise ServerFailed(f"{self.name} was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the first process runs."""
        return self._process is not None and self.poll() is None

    def poll(self) -> int | None:
        """The exit status of the first process; None while it runs, and when it was not started."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start it and return at once. The log begins with the command and what it adds to the environment."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            settings = " ".join(
                f"{name}={value}" for name, value in sorted(self._environment.items())
            )
            log.write(
                f"# {settings}\n# {subprocess.list2cmdline(self._command)}\n".encode()
            )
            log.flush()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def wait_ready(
        self,
        timeout_s: float,
        path: str = "/health",
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Wait until `path` answers 200.

        Args:
            say: gets a line now and then.

        Raises:
            ServerFailed: it ended, or the time was up.
        """
        started_s = time.monotonic()
        reported_s = started_s
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while True:
                if not self.alive:
                    code = self._process.returncode if self._process else None
                    raise self.failure(
                        f"ended with exit status {code} before it was ready"
                    )
                with suppress(httpx.TransportError):
                    if client.get(self.base_url + path).status_code == 200:
                        return
                now_s = time.monotonic()
                if now_s - started_s > timeout_s:
                    raise self.failure(f"was not ready after {timeout_s:.0f} s")
                if say is not None and now_s - reported_s > 15:
                    reported_s = now_s
                    say(f"waiting for {self.name} ({now_s - started_s:.0f} s)")
                time.sleep(_POLL_S)

    def failure(self, what: str) -> ServerFailed:
        """An error that says what happened and ends with the log."""
        return ServerFailed(
            f"{self.name} {what}. The end of {self.log_path}:\n\n{tail(self.log_path)}\n"
        )

    def stop(self) -> None:
        """End the process group: SIGTERM, and SIGKILL when that was not enough. Idempotent."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
        finally:
            # Workers may outlive the first process; the group is ours alone (start_new_session).
            deadline_s = time.monotonic() + 5.0
            while self._group_lives() and time.monotonic() < deadline_s:
                time.sleep(0.05)
            self._signal(signal.SIGKILL)
            process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True
