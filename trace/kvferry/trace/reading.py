"""Reads the recorded files of engines' processes.

A process may have been killed while it wrote, and files may have been damaged on their way: lines that cannot be read
are left out, counted and reported. Lines are read one by one; only the events are kept.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import msgspec

from kvferry.protocol.errors import InputError
from kvferry.trace.events import TRACE_VERSION, AnyEvent, Dropped, ProcessStarted


class InvalidTrace(InputError):
    """Recorded files that cannot be used at all. Damaged files are read as far as possible and reported."""

    # The command that prints it has this name already.
    what = ""


SUFFIX = ".jsonl"
_SHOWN_PROBLEMS = 3
_MAX_REASON = 160
"""Characters of a reason, which quotes its line."""

_decode = msgspec.json.Decoder(AnyEvent).decode


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that could be read.

    Attributes:
        processes: the events of each process in the order of their times; several times those that were copied.
        problems: of files that could not be read, or not all of them, or that lack events; a line each.
    """

    processes: defaultdict[ProcessStarted, list[AnyEvent]] = field(
        default_factory=lambda: defaultdict(list)
    )
    problems: list[str] = field(default_factory=list)


def read_recording(paths: Iterable[str | Path]) -> Recording:
    """Read files, and all `*.jsonl` in and below folders.

    Raises:
        InvalidTrace: a path does not exist, or no path has any events.
    """
    recording = Recording()
    names = [str(path) for path in paths]
    files: dict[str, None] = {}  # each once, however many paths and links lead to it
    for name in names:
        for file in _files_of(name, recording.problems):
            files[os.path.realpath(file)] = None
    for file in files:
        _read_file(file, recording)
    if not recording.processes:
        expected = f"files *{SUFFIX} with traces"
        if recording.problems:
            expected += f" ({'; '.join(recording.problems[:_SHOWN_PROBLEMS])})"
        raise InvalidTrace("DIR", ", ".join(names), expected)
    for events in recording.processes.values():
        # A process has a second file once the first was full, and whoever collects them may rename both.
        events.sort(key=attrgetter("at_ns"))
    return recording


def _files_of(path: str, problems: list[str]) -> list[str]:
    """The file, or the files of a folder.

    Raises:
        InvalidTrace: there is neither.
    """
    try:
        if os.path.isfile(path):
            return [path]
        if not os.path.isdir(path):
            raise InvalidTrace("DIR", path, "a folder or a file that exists")
    except ValueError as refused:  # a NUL in a name
        raise InvalidTrace("DIR", path, f"a path ({refused})") from None
    files = []
    unreadable: list[OSError] = []
    for folder, _, names in os.walk(path, onerror=unreadable.append):
        files += [f"{folder}/{name}" for name in names if name.endswith(SUFFIX)]
    for error in unreadable:
        problems.append(f"{error.filename}: cannot be read ({error.strerror})")
    return sorted(filter(os.path.isfile, files))


def _read_file(path: str, recording: Recording) -> None:
    """Add the events of a file, which are of several processes if the path was used again."""
    events: list[AnyEvent] | None = None
    num_lost = 0
    num_skipped = 0
    first_line = 0
    reason = ""
    for number, line in _lines(path, recording.problems):
        try:
            event = _decode(line)
            if isinstance(event, ProcessStarted):
                events = None  # until another process: those of another version
                _check_version(event)
                events = recording.processes[event]
            elif isinstance(event, Dropped):
                num_lost += event.count
            elif events is None:
                raise ValueError("no line before it says which process it is of")
            else:
                events.append(event)
        except (ValueError, RecursionError) as refused:
            if not line.isspace():
                num_skipped += 1
                first_line = first_line or number
                reason = reason or str(refused)[:_MAX_REASON]
    if num_skipped:
        more = f" and {num_skipped - 1} more" if num_skipped > 1 else ""
        problem = f"{path}: line {first_line}{more} left out: {reason}"
        recording.problems.append(problem)
    if num_lost:
        # Said, since a phase that is missing could otherwise be taken for one that did not happen.
        recording.problems.append(f"{path}: lacks {num_lost} events that were lost")


def _check_version(started: ProcessStarted) -> None:
    version = started.trace_version
    if version != TRACE_VERSION:
        raise ValueError(
            f"trace_version {version}, and this command reads {TRACE_VERSION}"
        )


def _lines(path: str, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            yield from enumerate(file, 1)
    except OSError as refused:
        problems.append(f"{path}: cannot be read ({refused.strerror or refused})")
