"""A report: the selected handovers, the durations of their phases and notes, as tables, as JSON and in texts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.cli.formatting import decimal_bytes, print_line, print_table
from kvferry.plan.wording import counted
from kvferry.trace.reading import Recording
from kvferry.trace.summary import Durations, Merged, durations, named, outcomes
from kvferry.trace.timeline import Chunk, Span, Timeline

SCHEMA = 1
_ROUTED = re.compile(r"^(?:chat)?cmpl-___prefill_addr_.*___decode_addr_[^_]*_(.+)$")
_UUID = re.compile(r"([0-9a-f]{8})-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_MOST_NOTES = 8


@dataclass(frozen=True, slots=True)
class Report:
    """The content that all output formats show.

    Attributes:
        timelines: all selected ones, the slowest first.
        durations: of every phase.
        outcomes: number of handovers by outcome.
        processes: number of processes whose files were read.
        notes: about clocks and damaged files, one line each.
    """

    timelines: tuple[Timeline, ...]
    durations: tuple[Durations, ...]
    outcomes: dict[str, int]
    processes: int
    notes: tuple[str, ...]

    @property
    def headline(self) -> str:
        """The number of handovers, by outcome."""
        found = ", ".join(f"{number} {outcome}" for outcome, number in self.outcomes.items())
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return f"{counted(len(self.timelines), 'handover')} of {processes}: {found or 'none'}"

    def phase_rows(self) -> Iterator[tuple[str, ...]]:
        """The table of phases: name, times, p50, p99, longest, meaning."""
        for one in self.durations:
            lasted = map(format_time, (one.p50_ns, one.p99_ns, one.max_ns))
            yield one.phase.label, str(one.count), *lasted, one.phase.meaning


def report(recording: Recording, merged: Merged, request: str | None) -> Report:
    """Report on all handovers, or on those of a request, given by a part of any of its ids."""
    timelines = merged.timelines
    if request is not None:
        timelines = tuple(one for one in timelines if named(one, request))
    differences = sorted(merged.clocks.differences, key=lambda one: one.at_least_ns, reverse=True)
    notes = (
        *_some(differences, "more pairs of clocks"),
        *_some(recording.damage, "more problems with files"),
    )
    return Report(
        timelines, durations(timelines), outcomes(timelines), len(recording.processes), notes
    )


def _some(found: Sequence[object], more: str) -> list[str]:
    left = len(found) - _MOST_NOTES
    return [*map(str, found[:_MOST_NOTES]), *([f"and {left} {more}"] if left > 0 else [])]


def format_time(nanoseconds: float) -> str:
    """`85 µs`, `4.21 ms`, `1.3 s`, `12 min`."""
    for unit, size in (("µs", 1e3), ("ms", 1e6)):
        if nanoseconds < 999.5 * size:
            return f"{nanoseconds / size:.3g} {unit}"
    if nanoseconds < 600e9:
        return f"{nanoseconds / 1e9:.3g} s"
    return f"{nanoseconds / 60e9:.0f} min"


def format_lasted(one: Timeline) -> str:
    """The duration of a handover, or a dash."""
    return "–" if one.lasted_ns is None else format_time(one.lasted_ns)


def format_result(one: Timeline) -> str:
    """`537 MB at 12.3 GB/s` of a load, `537 MB, 93% early` of one that followed the prefill, else the outcome."""
    if not one.bytes or not one.is_good:
        return one.outcome
    early = f", {100 * one.early_bytes // one.bytes}% early" if one.early_bytes else ""
    return (
        decimal_bytes(one.bytes) + early + ("" if one.gb_s is None else f" at {one.gb_s:.3g} GB/s")
    )


def format_missing(one: Timeline) -> str:
    """`not recorded: …`; empty where everything was."""
    return f"not recorded: {', '.join(one.missing)}" if one.missing else ""


def short_id(request: str, longest: int = 34) -> str:
    """The distinctive part of a request id, without the prefix of vLLM's router."""
    found = _ROUTED.match(request)
    name = found[1] if found else request
    return (
        name
        if len(name) <= longest
        else f"{name[: longest // 2 - 1]}…{name[-(longest - longest // 2) :]}"
    )


def name_of(one: Timeline, longest: int = 34) -> str:
    """A request's name in pictures: its id in the producer, else in the consumer."""
    return short_id(one.handover.producer_request or one.handover.consumer_request or "?", longest)


def format_engines(one: Timeline) -> str:
    """`prefill-0 → decode-1`, a UUID by its first part, and `?` for an engine that was not recorded."""
    named = (
        _UUID.sub(r"\1", engine or "?") for engine in (one.handover.producer, one.handover.consumer)
    )
    return " → ".join(short_id(engine, 20) for engine in named)


def ticks(longest_ns: float, about: int) -> list[int]:
    """About `about` round numbers from 0 to `longest_ns`."""
    if longest_ns <= 0:
        return [0]
    rough = max(longest_ns / about, 1)
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    return [int(step * index) for index in range(int(longest_ns // step) + 1)]


def print_listing(report: Report, slowest: int) -> None:
    """Print the tables, and the notes below them."""
    print_line(report.headline)
    print()
    print_table(("phase", ">times", ">p50", ">p99", ">longest", "what it is"), report.phase_rows())
    print("\nthe slowest handovers:\n")
    print_table(
        ("request", "engines", ">tokens", ">handover", "longest phase", "result"),
        (_row(one) for one in report.timelines[:slowest]),
    )
    for note in report.notes:
        print()
        print_line(note)


def _row(one: Timeline) -> tuple[str, ...]:
    longest = max(one.path, key=lambda span: span.lasted_ns, default=None)
    return (
        name_of(one, 30),
        format_engines(one),
        str(one.handover.tokens or "–"),
        format_lasted(one),
        f"{longest.phase.label} {format_time(longest.lasted_ns)}" if longest else "–",
        "; ".join(filter(None, (format_result(one), format_missing(one)))),
    )


def as_json(report: Report, slowest: int) -> dict[str, Any]:
    """The whole answer as plain values; times are nanoseconds since the epoch, lengths milliseconds."""
    return {
        "kvferry_trace": SCHEMA,
        "processes": report.processes,
        "handovers": len(report.timelines),
        "outcomes": report.outcomes,
        "phases": {
            one.phase: {
                "count": one.count,
                "p50_ms": one.p50_ns / 1e6,
                "p99_ms": one.p99_ns / 1e6,
                "max_ms": one.max_ns / 1e6,
            }
            for one in report.durations
        },
        "slowest": [_timeline(one) for one in report.timelines[:slowest]],
        "notes": list(report.notes),
    }


def _timeline(one: Timeline) -> dict[str, Any]:
    handover = one.handover
    return {
        "producer": handover.producer,
        "producer_request": handover.producer_request,
        "consumer": handover.consumer,
        "consumer_request": handover.consumer_request,
        "lease": {"boot": handover.lease.boot, "epoch": handover.lease.epoch}
        if handover.lease
        else None,
        "tokens": handover.tokens,
        "outcome": one.outcome,
        "missing": list(one.missing),
        "zero_ns": one.zero_ns,
        "handover_ms": None if one.lasted_ns is None else one.lasted_ns / 1e6,
        "bytes": one.bytes,
        "early_bytes": one.early_bytes,
        "gb_s": one.gb_s,
        "steps": [_chunk(step, one.zero_ns) for step in one.steps],
        "phases": [_span(span, one.zero_ns) for span in (*one.before, *one.path)],
        "held": _span(one.held, one.zero_ns) if one.held else None,
        "workers": [
            {
                "place": worker.load.process.place,
                "host": worker.load.process.host,
                **worker.load.figures,
                "stages": [_span(span, one.zero_ns) for span in worker.spans],
                "chunks": [_chunk(chunk, one.zero_ns) for chunk in worker.chunks],
            }
            for worker in one.workers
        ],
    }


def _chunk(chunk: Chunk, zero_ns: int) -> dict[str, Any]:
    return {**_span(chunk.span, zero_ns), "stop_token": chunk.stop_token}


def _span(span: Span, zero_ns: int) -> dict[str, Any]:
    """A span with its begin and end in milliseconds after the zero."""
    return {
        "phase": span.phase,
        "begun_ms": (span.begun_ns - zero_ns) / 1e6,
        "ended_ms": (span.ended_ns - zero_ns) / 1e6,
    }
