"""The parent's end: starts a child process that uses NIXL, receives its messages, and always ends it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO

import msgspec

from kvferry.cli.bench.messages import Failed, FromChild, ToChild

OWNER = ("-m", "kvferry.cli.bench.owner")
READER = ("-m", "kvferry.cli.bench.reader")
_NICE_S = 0.3
_LAST_WORDS = 300
_LANES = re.compile(r"(?:intra|inter)-node cfg#[0-9]+ +(.*)")
_decoder: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)


class Child:
    """A Python process in a session of its own, so that Ctrl-C does not reach it and its whole group can be killed.

    The output of UCX and other libraries goes to an unnamed temporary file.

    Args:
        command: the arguments of Python.
        environ: its environment.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        # A second exporter of NIXL's own telemetry would take an engine's port.
        kept = {name: value for name, value in environ.items() if not name.startswith("NIXL_TELEMETRY_")}
        logging = {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr"}
        self._errors: IO[bytes] = tempfile.TemporaryFile(prefix="kvferry-bench-")  # noqa: SIM115 - until `close`
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**kept, **logging},
            start_new_session=True,
        )
        self._reported: queue.SimpleQueue[FromChild] = queue.SimpleQueue()
        self._pump = threading.Thread(target=self._listen, name="kvferry-bench-child", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, message: ToChild) -> None:
        """Send one message; ignored if the child is gone, which `take` reports."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(msgspec.json.encode(message) + b"\n")
                self._process.stdin.flush()

    def take(self, timeout_s: float = 0.0) -> FromChild | None:
        """The child's next message, `Failed` when it has ended; None if none arrives in time."""
        try:
            return self._reported.get(timeout=timeout_s) if timeout_s > 0 else self._reported.get_nowait()
        except queue.Empty:
            return None

    def lanes(self) -> str:
        """The transports to its peer, as UCX names them; empty without a connection."""
        found = _LANES.findall(self._printed())
        return re.sub(r"\s+", " ", found[-1].replace("/memory", "")).strip() if found else ""

    def close(self) -> None:
        """Let it end by itself, so that its agent is closed; kill it after a short time. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_NICE_S)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._pump.join()
        self._errors.close()

    def _listen(self) -> None:
        if self._process.stdout is not None:
            with self._process.stdout:
                for line in self._process.stdout:
                    with contextlib.suppress(msgspec.DecodeError):
                        self._reported.put(_decoder.decode(line))
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"status {code}"
        self._reported.put(Failed(reason=f"its NIXL process ended with {how}{self._last_words()}"))

    def _last_words(self) -> str:
        lines = [line for line in self._printed().strip().splitlines() if " UCX  INFO " not in line]
        return f": {lines[-1].strip()[-_LAST_WORDS:]}" if lines else ""

    def _printed(self) -> str:
        if self._errors.closed:
            return ""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")
