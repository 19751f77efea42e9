"""The event file of one process in `trace_dir`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from kvferry.protocol.errors import InvalidConfig
from kvferry.trace.events import Dropped, Event, ProcessStarted

KEY = "trace_dir"
SMALLEST_BYTES = 1 << 20
DEFAULT_BYTES = 256 << 20

_EXPECTED = "a directory in which files can be made, or a new name in one"
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SUFFIX, _OLD_SUFFIX = ".jsonl", ".old.jsonl"


class TraceFile:
    """Events as lines of JSON, the newest of them in at most `max_bytes`.

    A file that has reached half of `max_bytes` is renamed from `NAME.jsonl` to `NAME.old.jsonl`, replacing the previous
    one, and a new file begins. Each begins with `started`.

    Args:
        folder: created with mode 0700 if it does not exist but its parent does.
        role: first part of the file's name.

    Raises:
        InvalidConfig: there is no such folder and it cannot be made, or nothing can be written there.
    """

    def __init__(self, folder: str, role: str, started: ProcessStarted, max_bytes: int = DEFAULT_BYTES) -> None:
        self._half_bytes = max_bytes // 2
        self._encoder = msgspec.json.Encoder()
        self._header = self._encoder.encode(started) + b"\n"
        try:
            with contextlib.suppress(FileExistsError):
                Path(folder).mkdir(mode=0o700)
            self.path, self._file = _new_file(Path(folder), _stem(role, started))
            self._size = 0
            self._write(self._header)
        except OSError as error:
            raise InvalidConfig(KEY, folder, f"{_EXPECTED} ({error.strerror})") from None

    def take(self, items: Sequence[Event], lost: int) -> None:
        """Write the events, after a line with the number of lost ones, if any.

        Raises:
            OSError: they are not written; the file ends with a whole line.
        """
        events = [Dropped(at_ns=items[0].at_ns, count=lost), *items] if lost and items else items
        lines = self._encoder.encode_lines(events)
        if self._size + len(lines) > self._half_bytes and self._size > len(self._header):
            self._begin_anew()
        self._write(lines if self._size else self._header + lines)

    def close(self) -> None:
        os.close(self._file)

    def _begin_anew(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # it was removed or renamed already
            self.path.replace(self.path.with_name(self.path.name.removesuffix(_SUFFIX) + _OLD_SUFFIX))
        file = os.open(self.path, _FLAGS, 0o600)
        os.close(self._file)
        self._file, self._size = file, 0

    def _write(self, lines: bytes) -> None:
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(lines)


def _stem(role: str, started: ProcessStarted) -> str:
    began = datetime.fromtimestamp(started.at_ns / 1e9, timezone.utc).strftime("%Y%m%dT%H%M%S")
    parts = (role, started.engine_id, started.part.value, started.place, str(started.pid), began)
    return "-".join(re.sub(r"[^A-Za-z0-9._-]", "_", part)[:64] for part in parts if part)


def _new_file(folder: Path, stem: str) -> tuple[Path, int]:
    """Create a file under a free name: processes in different containers may have the same pid."""
    number = 1
    while True:
        path = folder / (f"{stem}{_SUFFIX}" if number == 1 else f"{stem}-{number}{_SUFFIX}")
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, _FLAGS, 0o600)
        number += 1
