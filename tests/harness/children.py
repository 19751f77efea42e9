"""Processes of a test, at the other end of a pipe, which can be stopped and killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forkserver import forkserver
from tests.waiting import wait_until

START_S = 180.0
"""The first process of a session waits until the server that it is forked from has imported vLLM."""


class Child:
    """A process that calls `target(channel, *arguments)`, found by its name, and ends with this one at the latest."""

    def __init__(self, target: Callable[..., object], *arguments: object) -> None:
        context = forkserver()
        self._channel, theirs = context.Pipe()
        self._process = context.Process(
            target=target, args=(theirs, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, message: object) -> None:
        self._channel.send(message)

    def receive(self, timeout_s: float = START_S) -> Any:
        """The next message.

        Raises:
            TimeoutError: there is none in time.
            EOFError: the process has ended.
        """
        if not self._channel.poll(max(0.0, timeout_s)):
            raise TimeoutError(f"no message within {timeout_s:g} s")
        try:
            return self._channel.recv()
        except ConnectionResetError:
            raise EOFError("the process has ended") from None

    def maps_of(self, name: str) -> int:
        """How many maps the process has whose files' names contain this."""
        return Path(f"/proc/{self._process.pid}/maps").read_text().count(name)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/stat")
        wait_until(
            lambda: state.read_text().rpartition(")")[2].split()[0] in "Tt",
            "it stands still",
        )

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self, timeout_s: float = 60.0) -> int | None:
        """Close the pipe, which ends the process, and wait for it. Returns its exit code, None if it has not ended."""
        self._channel.close()
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL, unless it is gone already; returns when nothing of it is left."""
        self._process.kill()
        assert self.end() is not None, "it is not gone"

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
