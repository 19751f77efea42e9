"""Child processes that use NIXL: both ends of the pipe between a command and its child, and the command's measurement.

Each message is one frame of msgpack on a socket pair of its own, which nothing that a library prints can corrupt.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, TypeVar

import msgspec

from kvferry.cli.transfer.messages import (
    CaseProgress,
    Failed,
    Measured,
    Message,
    ReadableAgent,
    ReadsFailed,
    Task,
)

COMMAND = ("-m", "kvferry.cli.transfer.process")
# Timeout of loading NIXL, also on a busy machine.
START_S = 120.0
# Added to the timeout of a read before the reader counts as hanging: it compares bytes in between.
_GRACE_S = 10.0
# The caller's `idle` is called as often.
_POLL_S = 0.25
# Without progress a read counts as hanging; it is reported every 0.25 s.
_STUCK_S = 2.0
# Time for a child to end by itself, once its pipe is closed, before it is killed.
_ENDING_S = 0.3
# How long a child may take to end once it has closed its pipe: its status says why.
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
_Expected = TypeVar("_Expected", bound=msgspec.Struct)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def check_installed() -> None:
    """Check that torch and NIXL are there, which the children need and only the extra `worker` installs.

    Raises:
        ReadsFailed: one is missing.
    """
    missing = [
        name for name in ("torch", "nixl") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ReadsFailed(
            f"not installed: {', '.join(missing)}; pip install 'kvferry[worker]'"
        )


class Pipe:
    """One end of a pipe. Both methods raise `OSError` or `EOFError` when the other end is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Message) -> None:
        """Send one message."""
        self._connection.send_bytes(msgspec.msgpack.encode(message))

    def take(self, timeout_s: float | None = None) -> Message | None:
        """The other end's next message; None if none comes in time."""
        if not self._connection.poll(timeout_s):
            return None
        return _decoder.decode(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def play(part: Callable[[Pipe], None]) -> int:
    """Run a child's part until it ends or the command closes the pipe; an exception is sent as `Failed`, not printed.

    The last argument of the process is the file number of the pipe. Returns the exit status.
    """
    pipe = Pipe(Connection(int(sys.argv[-1])))
    try:
        part(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except ReadsFailed as failed:
        pipe.send(Failed(reason=str(failed), late=failed.late))
        return 1
    except Exception as failure:  # noqa: BLE001 - the command reports it
        pipe.send(Failed(reason=f"{type(failure).__name__}: {failure}"))
        return 1
    return 0


class Child:
    """The command's end: a Python process that lives until `close`.

    It is in a session of its own, so that Ctrl-C does not reach it and its whole group can be killed. What UCX and
    other libraries print goes to an unnamed temporary file.

    Args:
        command: the arguments of Python; the pipe's file number is added to them.
        environ: its environment.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str] = os.environ
    ) -> None:
        # A second exporter of NIXL's own telemetry would take an engine's port.
        child_environ = {
            name: value
            for name, value in environ.items()
            if not name.startswith("NIXL_TELEMETRY_")
        }
        child_environ.update(_UCX_LOG)
        own_end, child_end = multiprocessing.Pipe()
        self._pipe = Pipe(own_end)
        self._printed: IO[bytes] = tempfile.TemporaryFile(prefix="kvferry-")  # noqa: SIM115 - until `close`
        # Closed here, so that the pipe ends when the child does.
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, *command, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                env=child_environ,
                start_new_session=True,
            )
        # Also if the thread that waits for it is given up.
        atexit.register(self._kill)

    def send(self, message: Message) -> None:
        """Send one message; ignored if the child is gone, which `take` reports."""
        with contextlib.suppress(OSError):
            self._pipe.send(message)

    def take(self, timeout_s: float = 0.0) -> Message | None:
        """The child's next message; None if none arrives in time.

        Raises:
            ReadsFailed: the child has failed or ended.
        """
        try:
            message = self._pipe.take(timeout_s)
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

    def expect(self, kind: type[_Expected], timeout_s: float) -> _Expected:
        """The child's next message, which must be of this kind.

        Raises:
            ReadsFailed: the child has failed or ended, sent something else, or nothing in time.
        """
        message = self.take(timeout_s)
        if message is None:
            raise ReadsFailed(
                "its NIXL process hangs, or is slow: no answer in time", late=True
            )
        if not isinstance(message, kind):
            raise ReadsFailed(
                f"its NIXL process sent an unexpected message: {type(message).__name__}"
            )
        return message

    def lanes(self) -> str:
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
        self._end()
        self._printed.close()
        atexit.unregister(self._kill)

    def _end(self, timeout_s: float = _ENDING_S) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=timeout_s)
        self._kill()
        # In a driver's call not even a signal ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILLED_S)

    def _kill(self) -> None:
        # Without a return code it is not reaped yet, so the id is still its own.
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_line(self) -> str:
        lines = [
            line for line in self.printed().strip().splitlines() if " UCX  " not in line
        ]
        if not lines:
            return ""
        return f": {lines[-1].strip()[-_MAX_LAST_LINE:]}"

    def _last_error(self) -> str:
        errors = _ERROR.findall(self.printed())
        if not errors:
            return ""
        return f"; UCX says: {errors[-1].strip()}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results.

    Attributes:
        host: the owner's.
        lanes: the transports, as UCX names them.
    """

    host: str
    lanes: str
    measured: Measured


def measure(
    reader: Child,
    task: Task,
    connect: Callable[[bytes], ReadableAgent],
    show: Callable[[CaseProgress], None],
    idle: Callable[[], None] = lambda: None,
    start_s: float = START_S,
    end_s: float = math.inf,
) -> Outcome:
    """Let a reader read an owner's memory.

    Args:
        connect: makes the owner known to the reader's agent, by its metadata, and returns the owner's offer.
        show: called with the progress.
        idle: called several times a second while the reader works.
        start_s: deadline of loading NIXL.
        end_s: when all of it must have ended, by `time.monotonic`.

    Raises:
        ReadsFailed: the reader failed, ended or hangs.
    """
    show(CaseProgress(what="loading NIXL"))
    reader.send(task)
    # Loading NIXL has a deadline of its own: on a busy machine it takes longer than any read.
    own_agent = reader.expect(
        ReadableAgent, min(start_s, max(0.0, end_s - time.monotonic()))
    )
    owner = connect(own_agent.agent_metadata)
    reader.send(owner)
    progressed_s = time.monotonic()
    while True:
        message = reader.take(_POLL_S)
        if isinstance(message, Measured):
            return Outcome(owner.host, reader.lanes(), message)
        now_s = time.monotonic()
        silent_s = now_s - progressed_s
        # The caller's own deadline first: it has promised an answer by then.
        if now_s > end_s:
            is_slow = silent_s < _STUCK_S
            how = "is slow" if is_slow else "hangs"
            raise ReadsFailed(f"NIXL {how}: out of time", late=True, is_slow=is_slow)
        if isinstance(message, CaseProgress):
            progressed_s = now_s
            show(message)
        elif silent_s > task.timeout_s + _GRACE_S:
            raise ReadsFailed(f"NIXL hangs: no result for {silent_s:.0f} s", late=True)
        idle()
