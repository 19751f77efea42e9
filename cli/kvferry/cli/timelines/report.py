"""What a command has to tell: which handovers, out of how many, and what a reader must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.words import counted
from kvferry.trace.reading import Recording
from kvferry.trace.summary import Durations, Merged, durations, named, outcomes
from kvferry.trace.timeline import Timeline

_MOST_NOTES = 8


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is shown.

    Attributes:
        timelines: all of them that were asked for, the slowest first.
        durations: of every phase.
        outcomes: how many handovers ended how.
        processes: whose files were read.
        notes: about clocks and damaged files, one line each.
    """

    timelines: tuple[Timeline, ...]
    durations: tuple[Durations, ...]
    outcomes: dict[str, int]
    processes: int
    notes: tuple[str, ...]


def report(recording: Recording, merged: Merged, request: str | None) -> Report:
    """About all handovers, or about those of a request, of which any id may be given, or its beginning."""
    timelines = merged.timelines
    if request is not None:
        timelines = tuple(one for one in timelines if named(one, request))
    differences = sorted(merged.clocks.differences, key=lambda one: one.at_least_ns, reverse=True)
    notes = (*_some(differences, "more pairs of clocks"), *_some(recording.damage, "more problems with files"))
    return Report(timelines, durations(timelines), outcomes(timelines), len(recording.processes), notes)


def told_first(told: Report) -> str:
    """How many there are, and what came of them."""
    found = ", ".join(f"{number} {outcome}" for outcome, number in told.outcomes.items())
    processes = "1 process" if told.processes == 1 else f"{told.processes} processes"
    return f"{counted(len(told.timelines), 'handover')} of {processes}: {found or 'none'}"


def _some(found: Sequence[object], more: str) -> list[str]:
    left = len(found) - _MOST_NOTES
    return [*map(str, found[:_MOST_NOTES]), *([f"and {left} {more}"] if left > 0 else [])]
