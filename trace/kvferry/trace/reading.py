"""Reads the recorded files of engines' processes.

A process may have been killed while it wrote, and files may have been damaged on their way: lines that cannot be read
are left out, counted and reported. Lines are read one by one; only the events are kept.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
_MAX_PROBLEM = 160
"""Characters of a problem, which quotes its line."""

_decode = msgspec.json.Decoder(AnyEvent).decode


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that could be read.

    Attributes:
        processes: the events of each process in the order of their times; several times those that were copied.
        problems: a line for each defect of each file.
    """

    processes: dict[ProcessStarted, list[AnyEvent]]
    problems: tuple[str, ...]


def read_recording(paths: Iterable[str | Path]) -> Recording:
    """Read files, and all `*.jsonl` in and below folders.

    Raises:
        InvalidTrace: a path does not exist, or no path has any events.
    """
    names = [str(path) for path in paths]
    reader = _FileReader()
    files: dict[str, None] = {}  # each once, however many paths and links lead to it
    for name in names:
        for file in reader.files_of(name):
            files[os.path.realpath(file)] = None
    for file in files:
        reader.read(file)
    problems = reader.problems()
    if not reader.processes:
        expected = f"files *{SUFFIX} with traces"
        if problems:
            expected += f" ({'; '.join(problems[:_SHOWN_PROBLEMS])})"
        raise InvalidTrace("DIR", ", ".join(names), expected)
    for events in reader.processes.values():
        # A process has a second file once the first was full, and whoever collects them may rename both.
        events.sort(key=attrgetter("at_ns"))
    return Recording(reader.processes, problems)


class _FileReader:
    """The events of all files so far, and the defects of each file.

    Attributes:
        processes: the events of each process, file after file.
    """

    def __init__(self) -> None:
        self.processes: defaultdict[ProcessStarted, list[AnyEvent]] = defaultdict(list)
        # By path and problem: the first line with it, 0 for the whole file, and the number of lines.
        self._first_lines: dict[tuple[str, str], int] = {}
        self._num_lines: Counter[tuple[str, str]] = Counter()

    def files_of(self, path: str) -> Iterator[str]:
        """The file, or the files of a folder.

        Raises:
            InvalidTrace: there is neither.
        """
        try:
            if os.path.isfile(path):
                yield path
                return
            if not os.path.isdir(path):
                raise InvalidTrace("DIR", path, "a folder or a file that exists")
        except ValueError as refused:  # a NUL in a name
            raise InvalidTrace("DIR", path, f"a path ({refused})") from None
        for folder, inner, names in os.walk(path, onerror=self._add_unreadable):
            inner.sort()  # in place: so `os.walk` visits the folders in this order
            for name in sorted(names):
                file = f"{folder}/{name}"
                if name.endswith(SUFFIX) and os.path.isfile(file):
                    yield file

    def read(self, path: str) -> None:
        """Add the events of a file; they are of several processes if the path was used again."""
        events: list[AnyEvent] | None = None
        for number, line in self._lines(path):
            try:
                event = _decode(line)
            except (ValueError, RecursionError) as refused:
                if not line.isspace():
                    self._add_problem(path, _why_no_event(line, refused), number)
                continue
            if isinstance(event, ProcessStarted):
                if event.trace_version == TRACE_VERSION:
                    events = self.processes[event]
                    continue
                events = []  # of no process: they are left out
                problem = f"trace_version {event.trace_version}, and this command reads {TRACE_VERSION}"
                self._add_problem(path, problem, number)
            elif isinstance(event, Dropped):
                # Said, since a phase that is missing could otherwise be taken for one that did not happen.
                problem = f"{event.count} events were lost before it"
                self._add_problem(path, problem, number)
            elif events is not None:
                events.append(event)
            else:
                problem = "an event before any line that says which process it is of"
                self._add_problem(path, problem, number)

    def problems(self) -> tuple[str, ...]:
        """A line for each, in the order in which they were found."""
        lines = []
        for (path, problem), first_line in self._first_lines.items():
            where = path
            if first_line:
                where += f": line {first_line}"
            num_more = self._num_lines[path, problem] - 1
            if num_more:
                where += f" and {num_more} more"
            lines.append(f"{where}: {problem}")
        return tuple(lines)

    def _lines(self, path: str) -> Iterator[tuple[int, bytes]]:
        try:
            with open(path, "rb") as file:
                yield from enumerate(file, 1)
        except OSError as refused:
            refused.filename = path  # which an error while reading does not have
            self._add_unreadable(refused)

    def _add_unreadable(self, refused: OSError) -> None:
        why = refused.strerror or refused
        self._add_problem(str(refused.filename), f"cannot be read ({why})")

    def _add_problem(self, path: str, problem: str, line: int = 0) -> None:
        self._first_lines.setdefault((path, problem), line)
        self._num_lines[path, problem] += 1


def _why_no_event(line: bytes, refused: Exception) -> str:
    # The process may have been killed while it wrote its last line.
    if not line.endswith(b"\n"):
        return "cut off in the middle"
    if isinstance(refused, msgspec.ValidationError):
        return f"no event that this command knows ({refused})"[:_MAX_PROBLEM]
    return "no JSON"
