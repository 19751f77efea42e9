"""Reads the recorded files of engines' processes.

A process may have been killed while it wrote, and files may have been damaged on their way: lines that cannot be read
are left out, counted and reported. Lines are read one by one; only the events are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.protocol.errors import InputError
from kvferry.trace.events import TRACE_VERSION, AnyEvent, Dropped, ProcessStarted


@dataclass(slots=True)
class Damage:
    """A defect of a file.

    Attributes:
        line: the first line with the defect, from 1; 0 for the whole file.
        lines: number of lines with it.
    """

    path: str
    problem: str
    line: int
    lines: int = 0

    def __str__(self) -> str:
        if not self.line:
            return f"{self.path}: {self.problem}"
        more = f" and {self.lines - 1} more" if self.lines > 1 else ""
        return f"{self.path}: line {self.line}{more}: {self.problem}"


class DamageReport(dict[tuple[str, str], Damage]):
    """Defects by file and problem, in the order in which they were found."""

    def add(self, path: str, problem: str, line: int = 0) -> None:
        """Count one defect."""
        self.setdefault((path, problem), Damage(path, problem, line)).lines += 1


class InvalidTrace(InputError):
    """Recorded files that cannot be used at all. Damaged files are read as far as possible and reported."""

    # The command that prints it has this name already.
    what = ""


SUFFIX = ".jsonl"
_SHOWN_DAMAGE = 3
_MAX_PROBLEM = 160
"""Characters of a problem, which quotes its line."""

_decode = msgspec.json.Decoder(AnyEvent).decode


@dataclass(frozen=True, slots=True)
class Process:
    """The events of one process, in order."""

    path: str
    started: ProcessStarted
    events: list[AnyEvent]


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that could be read."""

    processes: tuple[Process, ...]
    damage: tuple[Damage, ...]


def read_recording(paths: Iterable[str | Path]) -> Recording:
    """Read files, and all `*.jsonl` in and below folders.

    Raises:
        InvalidTrace: a path does not exist, or no path has any events.
    """
    names = [str(path) for path in paths]
    report = DamageReport()
    files: dict[str, None] = {}  # each once, however many paths and links lead to it
    for name in names:
        for file in _files_of(name, report):
            files[os.path.realpath(file)] = None
    parts: dict[ProcessStarted, list[Process]] = {}
    for file in files:
        for part in _read_file(file, report):
            _add_part(parts.setdefault(part.started, []), part, report)
    if not parts:
        expected = f"files *{SUFFIX} with traces"
        first_damage = list(report.values())[:_SHOWN_DAMAGE]
        if first_damage:
            expected += f" ({'; '.join(map(str, first_damage))})"
        raise InvalidTrace("DIR", ", ".join(names), expected)
    processes = tuple(map(_joined, parts.values()))
    return Recording(processes, tuple(report.values()))


def _add_part(parts: list[Process], part: Process, report: DamageReport) -> None:
    """Add one file of a process, which has a second one once the first was full."""
    for index, known in enumerate(parts):
        # Two copies of a file, of which one may have been made earlier: the longer one is kept.
        if known.events[:1] == part.events[:1]:
            is_longer = len(part.events) > len(known.events)
            longer = part if is_longer else known
            shorter = known if is_longer else part
            report.add(shorter.path, f"left out: a copy of {longer.path}")
            parts[index] = longer
            return
    parts.append(part)


def _joined(parts: list[Process]) -> Process:
    if len(parts) == 1:
        return parts[0]
    # By their events and not their names: files are renamed when they are full, and by whoever collects them.
    parts.sort(key=_first_event_ns)
    events: list[AnyEvent] = []
    for part in parts:
        events += part.events
    return Process(parts[0].path, parts[0].started, events)


def _first_event_ns(part: Process) -> int:
    if not part.events:
        return 0
    return part.events[0].at_ns


def _files_of(path: str, report: DamageReport) -> Iterator[str]:
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

    def on_error(refused: OSError) -> None:
        report.add(str(refused.filename), _why(refused))

    for folder, inner, names in os.walk(path, onerror=on_error):
        inner.sort()  # in place: so `os.walk` visits the folders in this order
        for name in sorted(names):
            file = f"{folder}/{name}"
            if name.endswith(SUFFIX) and os.path.isfile(file):
                yield file


def _read_file(path: str, report: DamageReport) -> Iterator[Process]:
    """The processes of a file: more than one if the path was used again."""
    process: Process | None = None
    is_skipping = False
    for number, line in _lines(path, report):
        try:
            event = _decode(line)
        except (ValueError, RecursionError) as refused:
            if not line.isspace():
                report.add(path, _problem(line, refused), number)
            continue
        if isinstance(event, ProcessStarted):
            if process is not None:
                yield process
            process = None
            is_skipping = event.trace_version != TRACE_VERSION
            if is_skipping:
                problem = f"trace_version {event.trace_version}, and this command reads {TRACE_VERSION}"
                report.add(path, problem, number)
            else:
                process = Process(path, event, [])
        elif isinstance(event, Dropped):
            # Said, since a phase that is missing could otherwise be taken for one that did not happen.
            report.add(path, f"{event.count} events were lost before it", number)
        elif process is not None:
            process.events.append(event)
        elif not is_skipping:
            report.add(
                path,
                "an event before any line that says which process it is of",
                number,
            )
    if process is not None:
        yield process


def _lines(path: str, report: DamageReport) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            yield from enumerate(file, 1)
    except OSError as refused:
        report.add(path, _why(refused))


def _problem(line: bytes, refused: Exception) -> str:
    # The process may have been killed while it wrote its last line.
    if not line.endswith(b"\n"):
        return "cut off in the middle"
    if isinstance(refused, msgspec.ValidationError):
        return f"no event that this command knows ({refused})"[:_MAX_PROBLEM]
    return "no JSON"


def _why(refused: OSError) -> str:
    return f"cannot be read ({refused.strerror or refused})"
