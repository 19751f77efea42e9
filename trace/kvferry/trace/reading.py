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

    what = "trace"


SUFFIX = ".jsonl"

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
    names, report = [str(path) for path in paths], DamageReport()
    parts: dict[ProcessStarted, list[Process]] = {}
    for file in dict.fromkeys(
        os.path.realpath(file) for name in names for file in _files_of(name, report)
    ):
        for part in _read_file(file, report):
            _keep(parts.setdefault(part.started, []), part, report)
    if not parts:
        why = "; ".join(map(str, [*report.values()][:3]))
        raise InvalidTrace(
            "DIR", ", ".join(names), f"files *{SUFFIX} with traces{f' ({why})' if why else ''}"
        )
    return Recording(tuple(_joined(several) for several in parts.values()), (*report.values(),))


def _keep(parts: list[Process], part: Process, report: DamageReport) -> None:
    """Add a process's file: it has a second one once the first was full. Of two copies the longer is kept."""
    for index, known in enumerate(parts):
        if known.events[:1] == part.events[:1]:
            shorter, longer = sorted((part, known), key=lambda one: len(one.events))
            report.add(shorter.path, f"left out: a copy of {longer.path}")
            parts[index] = longer
            return
    parts.append(part)


def _joined(parts: list[Process]) -> Process:
    if len(parts) == 1:
        return parts[0]
    parts.sort(key=lambda one: one.events[0].at_ns if one.events else 0)
    return Process(
        parts[0].path, parts[0].started, [event for part in parts for event in part.events]
    )


def _files_of(path: str, report: DamageReport) -> Iterator[str]:
    """Raises `InvalidTrace`."""
    try:
        if os.path.isfile(path):
            yield path
            return
        if not os.path.isdir(path):
            raise InvalidTrace("DIR", path, "a folder or a file that exists")
    except ValueError as refused:  # a NUL in a name
        raise InvalidTrace("DIR", path, f"a path ({refused})") from None
    for folder, inner, names in os.walk(
        path, onerror=lambda refused: report.add(str(refused.filename), _why(refused))
    ):
        inner.sort()
        yield from (
            file
            for name in sorted(names)
            if name.endswith(SUFFIX) and os.path.isfile(file := f"{folder}/{name}")
        )


def _read_file(path: str, report: DamageReport) -> Iterator[Process]:
    """The processes of a file: more than one if the path was used again."""
    process: Process | None = None
    skipping = False
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
            skipping = event.trace_version != TRACE_VERSION
            process = None if skipping else Process(path, event, [])
            if skipping:
                report.add(
                    path,
                    f"trace_version {event.trace_version}, and this command reads {TRACE_VERSION}",
                    number,
                )
        elif isinstance(event, Dropped):
            report.add(path, f"{event.count} events were lost before it", number)
        elif process is not None:
            process.events.append(event)
        elif not skipping:
            report.add(path, "an event before any line that says which process it is of", number)
    if process is not None:
        yield process


def _lines(path: str, report: DamageReport) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            yield from enumerate(file, 1)
    except OSError as refused:
        report.add(path, _why(refused))


def _problem(line: bytes, refused: Exception) -> str:
    if not line.endswith(b"\n"):
        return "cut off in the middle"
    if isinstance(refused, msgspec.ValidationError):
        return f"no event that this command knows ({refused})"[:160]
    return "no JSON"


def _why(refused: OSError) -> str:
    return f"cannot be read ({refused.strerror or refused})"
