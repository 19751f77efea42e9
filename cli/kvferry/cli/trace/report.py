"""The content of a command's report: which handovers, out of how many, and what a reader must know."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.formatting import counted, decimal_bytes
from kvferry.trace.reading import Recording
from kvferry.trace.summary import Durations, Merged, durations, named, outcomes
from kvferry.trace.timeline import Timeline

_ROUTED = re.compile(r"^(?:chat)?cmpl-___prefill_addr_.*___decode_addr_[^_]*_(.+)$")


def format_time(nanoseconds: float) -> str:
    """`85 µs`, `4.21 ms`, `1.3 s`, `12 min`."""
    for unit, size in (("µs", 1e3), ("ms", 1e6)):
        if nanoseconds < 999.5 * size:
            return f"{nanoseconds / size:.3g} {unit}"
    if nanoseconds < 600e9:
        return f"{nanoseconds / 1e9:.3g} s"
    return f"{nanoseconds / 60e9:.0f} min"


def format_rate(one: Timeline) -> str:
    """`537 MB at 12.3 GB/s`; empty where nothing was loaded."""
    if not one.bytes:
        return ""
    return decimal_bytes(one.bytes) + ("" if one.gb_s is None else f" at {one.gb_s:.3g} GB/s")


def short_id(request: str, longest: int = 34) -> str:
    """What tells a request apart from others: without what a router puts before every id."""
    found = _ROUTED.match(request)
    name = found[1] if found else request
    return name if len(name) <= longest else f"{name[: longest // 2 - 1]}…{name[-(longest - longest // 2) :]}"


def name_of(one: Timeline, longest: int = 34) -> str:
    """What a request is called in a picture: the client's name for it, else an id."""
    handover = one.handover
    return short_id(handover.correlation or handover.producer_request or handover.consumer_request or "?", longest)


def format_engines(one: Timeline) -> str:
    """`prefill-0 → decode-1`, with what was not recorded."""
    handover = one.handover
    return f"{short_id(handover.producer or '?', 20)} → {short_id(handover.consumer or '?', 20)}"


def ticks(longest_ns: float, about: int) -> list[int]:
    """Round numbers from 0 on, of which about so many fit."""
    if longest_ns <= 0:
        return [0]
    rough = max(longest_ns / about, 1)
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [int(step * index) for index in range(int(longest_ns // step) + 1)]


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


def headline(reported: Report) -> str:
    """How many there are, and what came of them."""
    found = ", ".join(f"{number} {outcome}" for outcome, number in reported.outcomes.items())
    processes = "1 process" if reported.processes == 1 else f"{reported.processes} processes"
    return f"{counted(len(reported.timelines), 'handover')} of {processes}: {found or 'none'}"


def _some(found: Sequence[object], more: str) -> list[str]:
    left = len(found) - _MOST_NOTES
    return [*map(str, found[:_MOST_NOTES]), *([f"and {left} {more}"] if left > 0 else [])]
