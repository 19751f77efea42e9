"""A recorder: a queue from a busy thread to a writer thread, and the event file of a process in `trace_dir`.

    record ──► queue ──► writer thread ──► Sink: a TraceFile, or spans of OpenTelemetry

`record` costs the busy thread one append, and it never waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from kvferry.protocol.errors import InvalidConfig
from kvferry.trace.events import Dropped, Event, ProcessStarted

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Taken = TypeVar("Taken", contravariant=True)

GATHER_S = 0.2
"""Time between writes: a killed process loses at most the items of that time."""
CLOSE_S = 5.0
"""Most time that the end of a process waits for the writer."""
MOST_WAITING = 1 << 16
# Few, since encoding them holds the interpreter's lock, for a fraction of a millisecond.
_BATCH = 256
"""Most items of one write."""

KEY = "trace_dir"
SMALLEST_BYTES = 1 << 20
DEFAULT_BYTES = 256 << 20

_EXPECTED = "a directory in which files can be made, or a new name in one"
_FLAGS = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
)
_SUFFIX = ".jsonl"
_OLD_SUFFIX = ".old.jsonl"
_MAX_NAME_PART = 64
"""Characters of one part of a file's name."""


class Sink(Protocol[Taken]):
    """The destination of a recorder's items. Called by the writer thread."""

    def take(self, items: Sequence[Taken], lost: int) -> None:
        """Write the items, in order. May raise any exception: the items are lost then.

        Args:
            lost: items that were lost since the last call that did not raise.
        """

    def close(self) -> None:
        """Called once, after the last item."""


class Recorder(Generic[Item]):
    """One queue and one writer thread.

    Args:
        name: name of the thread.
        most_waiting: items in the queue; more are dropped.
    """

    def __init__(
        self,
        sink: Sink[Item],
        name: str = "kvferry-trace",
        *,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._sink = sink
        self._most_waiting = most_waiting
        self._waiting: deque[Item] = deque()
        self._num_refused = 0
        self._num_failed = 0
        self._reported_lost = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Items that were not written and will not be."""
        return self._num_refused + self._num_failed

    def record(self, item: Item) -> None:
        """Queue an item to be written soon. Called by one thread; never raises, never waits."""
        # No lock: one thread appends, one takes, and only the first counts refusals.
        if len(self._waiting) < self._most_waiting:
            self._waiting.append(item)
        else:
            self._num_refused += 1

    def close(self) -> None:
        """Write the waiting items, for at most `CLOSE_S`. Idempotent."""
        # From now on everything is refused, so the writer comes to an end.
        self._most_waiting = 0
        self._ending.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning(
                "%s: the last events are not written after %g s",
                self._thread.name,
                CLOSE_S,
            )

    def _run(self) -> None:
        while not self._ending.wait(GATHER_S):
            self._write_all()
        self._write_all()
        self._sink.close()

    def _write_all(self) -> None:
        while self._waiting:
            num_items = min(_BATCH, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(num_items)]
            # Read once: more may be lost while this is written.
            lost = self.num_lost
            try:
                self._sink.take(batch, lost - self._reported_lost)
            except Exception as error:  # noqa: BLE001 - the next batch is written nevertheless
                # Once: a full disk would repeat the line five times a second.
                if not self._num_failed:
                    logger.warning(
                        "%s: cannot be written, and events may be lost: %r",
                        self._thread.name,
                        error,
                    )
                self._num_failed += len(batch)
            else:
                self._reported_lost = lost


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

    def __init__(
        self,
        folder: str,
        role: str,
        started: ProcessStarted,
        max_bytes: int = DEFAULT_BYTES,
    ) -> None:
        self._half_bytes = max_bytes // 2
        self._encoder = msgspec.json.Encoder()
        self._header = self._encoder.encode(started) + b"\n"
        try:
            with contextlib.suppress(FileExistsError):
                Path(folder).mkdir(mode=0o700)
            self.path = Path(folder) / f"{_stem(role, started)}{_SUFFIX}"
            self._file = os.open(self.path, _FLAGS, 0o600)
            self._size = 0
            self._write(self._header)
        except OSError as error:
            raise InvalidConfig(
                KEY, folder, f"{_EXPECTED} ({error.strerror})"
            ) from None

    def take(self, items: Sequence[Event], lost: int) -> None:
        """Write the events, after a line with the number of lost ones, if any.

        Raises:
            OSError: they are not written; the file ends with a whole line.
        """
        events = items
        if lost and items:
            events = [Dropped(at_ns=items[0].at_ns, count=lost), *items]
        lines = self._encoder.encode_lines(events)
        has_events = self._size > len(self._header)
        if has_events and self._size + len(lines) > self._half_bytes:
            self._begin_anew()
        if not self._size:
            # With the events and not before them: a new file whose first write fails stays empty.
            lines = self._header + lines
        self._write(lines)

    def close(self) -> None:
        os.close(self._file)

    def _begin_anew(self) -> None:
        old_name = self.path.name.removesuffix(_SUFFIX) + _OLD_SUFFIX
        # It may have been removed or renamed already.
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(self.path.with_name(old_name))
        # The old file is closed last: if the new one cannot be made, there still is one to write to.
        file = os.open(self.path, _FLAGS, 0o600)
        os.close(self._file)
        self._file = file
        self._size = 0

    def _write(self, lines: bytes) -> None:
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            # A part of the lines may be written. Without it the file ends with a whole line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(lines)


def _stem(role: str, started: ProcessStarted) -> str:
    """A new name that shows whose file it is."""
    began = datetime.fromtimestamp(started.at_ns / 1e9, timezone.utc)
    parts = (
        role,
        started.engine_id,
        started.part.value,
        started.place,
        str(started.pid),
        began.strftime("%Y%m%dT%H%M%S"),
        # Processes in different containers may have the same pid, and one folder.
        secrets.token_hex(4),
    )
    # An operator chooses the engine's id, with any character.
    safe = (
        re.sub(r"[^A-Za-z0-9._-]", "_", part)[:_MAX_NAME_PART] for part in parts if part
    )
    return "-".join(safe)
