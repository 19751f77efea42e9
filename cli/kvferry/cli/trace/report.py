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
from kvferry.trace.summary import Durations, Merged, durations, has_id, outcomes
from kvferry.trace.timeline import Chunk, Span, Timeline, WorkerSpans

SCHEMA = 1
_ROUTED = re.compile(r"^(?:chat)?cmpl-___prefill_addr_.*___decode_addr_[^_]*_(.+)$")
_UUID = re.compile(r"([0-9a-f]{8})-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_MAX_NOTES = 8
"""Of one kind."""


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
        by_outcome = [f"{number} {outcome}" for outcome, number in self.outcomes.items()]
        processes = "1 process"
        if self.processes != 1:
            processes = f"{self.processes} processes"
        handovers = counted(len(self.timelines), "handover")
        return f"{handovers} of {processes}: {', '.join(by_outcome) or 'none'}"

    def phase_rows(self) -> Iterator[tuple[str, ...]]:
        """The table of phases: name, times, p50, p99, longest, meaning."""
        for lasted in self.durations:
            yield (
                lasted.phase.label,
                str(lasted.count),
                format_time(lasted.p50_ns),
                format_time(lasted.p99_ns),
                format_time(lasted.max_ns),
                lasted.phase.meaning,
            )


def report(recording: Recording, merged: Merged, request: str | None) -> Report:
    """Report on all handovers, or on those of a request, given by a part of any of its ids."""
    timelines = merged.timelines
    if request is not None:
        timelines = tuple(timeline for timeline in timelines if has_id(timeline, request))
    notes = _notes(merged.clocks.notes, "more pairs of clocks")
    notes += _notes(recording.damage, "more problems with files")
    return Report(
        timelines=timelines,
        durations=durations(timelines),
        outcomes=outcomes(timelines),
        processes=len(recording.processes),
        notes=tuple(notes),
    )


def _notes(problems: Sequence[object], more: str) -> list[str]:
    """The first problems, and the number of all others."""
    notes = [str(problem) for problem in problems[:_MAX_NOTES]]
    num_left = len(problems) - _MAX_NOTES
    if num_left > 0:
        notes.append(f"and {num_left} {more}")
    return notes


def format_time(nanoseconds: float) -> str:
    """`85 µs`, `4.21 ms`, `1.3 s`, `12 min`."""
    for unit, size in (("µs", 1e3), ("ms", 1e6)):
        if nanoseconds < 999.5 * size:
            return f"{nanoseconds / size:.3g} {unit}"
    if nanoseconds < 600e9:
        return f"{nanoseconds / 1e9:.3g} s"
    return f"{nanoseconds / 60e9:.0f} min"


def format_lasted(timeline: Timeline) -> str:
    """The duration of a handover, or a dash."""
    if timeline.lasted_ns is None:
        return "–"
    return format_time(timeline.lasted_ns)


def format_result(timeline: Timeline) -> str:
    """`537 MB at 12.3 GB/s` of a load, `537 MB, 93% early` of one that followed the prefill, else the outcome."""
    if not timeline.bytes or not timeline.is_good:
        return timeline.outcome
    result = decimal_bytes(timeline.bytes)
    if timeline.early_bytes:
        result += f", {100 * timeline.early_bytes // timeline.bytes}% early"
    if timeline.gb_s is not None:
        result += f" at {timeline.gb_s:.3g} GB/s"
    return result


def format_missing(timeline: Timeline) -> str:
    """`not recorded: …`; empty where everything was."""
    if not timeline.missing:
        return ""
    return f"not recorded: {', '.join(timeline.missing)}"


def short_id(request: str, max_length: int = 34) -> str:
    """The distinctive part of a request id, without the prefix of vLLM's router."""
    routed = _ROUTED.match(request)
    name = routed[1] if routed else request
    if len(name) <= max_length:
        return name
    num_first = max_length // 2 - 1
    num_last = max_length - max_length // 2
    return f"{name[:num_first]}…{name[-num_last:]}"


def name_of(timeline: Timeline, max_length: int = 34) -> str:
    """A request's name in pictures: its id in the producer, else in the consumer."""
    handover = timeline.handover
    request = handover.producer_request or handover.consumer_request or "?"
    return short_id(request, max_length)


def format_engines(timeline: Timeline) -> str:
    """`prefill-0 → decode-1`, a UUID by its first part, and `?` for an engine that was not recorded."""
    handover = timeline.handover
    names = []
    for engine in (handover.producer, handover.consumer):
        name = _UUID.sub(r"\1", engine or "?")
        names.append(short_id(name, 20))
    return " → ".join(names)


def ticks(longest_ns: float, about: int) -> list[int]:
    """About `about` round numbers from 0 to `longest_ns`."""
    if longest_ns <= 0:
        return [0]
    # The next round step, which is 1, 2 or 5 times a power of ten.
    exact_step = max(longest_ns / about, 1)
    power = 10 ** math.floor(math.log10(exact_step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= exact_step)
    return [int(step * index) for index in range(int(longest_ns // step) + 1)]


def print_listing(report: Report, slowest: int) -> None:
    """Print the tables, and the notes below them."""
    print_line(report.headline)
    print()
    print_table(("phase", ">times", ">p50", ">p99", ">longest", "what it is"), report.phase_rows())
    print("\nthe slowest handovers:\n")
    print_table(
        ("request", "engines", ">tokens", ">handover", "longest phase", "result"),
        (_row(timeline) for timeline in report.timelines[:slowest]),
    )
    for note in report.notes:
        print()
        print_line(note)


def _row(timeline: Timeline) -> tuple[str, ...]:
    longest_phase = "–"
    if timeline.path:
        longest = max(timeline.path, key=lambda span: span.lasted_ns)
        longest_phase = f"{longest.phase.label} {format_time(longest.lasted_ns)}"
    result = format_result(timeline)
    if timeline.missing:
        result = f"{result}; {format_missing(timeline)}"
    return (
        name_of(timeline, 30),
        format_engines(timeline),
        str(timeline.handover.tokens or "–"),
        format_lasted(timeline),
        longest_phase,
        result,
    )


def as_json(report: Report, slowest: int) -> dict[str, Any]:
    """The whole answer as plain values; times are nanoseconds since the epoch, lengths milliseconds."""
    return {
        "kvferry_trace": SCHEMA,
        "processes": report.processes,
        "handovers": len(report.timelines),
        "outcomes": report.outcomes,
        "phases": {
            lasted.phase: {
                "count": lasted.count,
                "p50_ms": lasted.p50_ns / 1e6,
                "p99_ms": lasted.p99_ns / 1e6,
                "max_ms": lasted.max_ns / 1e6,
            }
            for lasted in report.durations
        },
        "slowest": [_timeline(timeline) for timeline in report.timelines[:slowest]],
        "notes": list(report.notes),
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    handover = timeline.handover
    zero_ns = timeline.zero_ns
    lease = None
    if handover.lease:
        lease = {"boot": handover.lease.boot, "epoch": handover.lease.epoch}
    handover_ms = None
    if timeline.lasted_ns is not None:
        handover_ms = timeline.lasted_ns / 1e6
    held = None
    if timeline.held:
        held = _span(timeline.held, zero_ns)
    return {
        "producer": handover.producer,
        "producer_request": handover.producer_request,
        "consumer": handover.consumer,
        "consumer_request": handover.consumer_request,
        "lease": lease,
        "tokens": handover.tokens,
        "outcome": timeline.outcome,
        "missing": list(timeline.missing),
        "zero_ns": zero_ns,
        "handover_ms": handover_ms,
        "bytes": timeline.bytes,
        "early_bytes": timeline.early_bytes,
        "gb_s": timeline.gb_s,
        "steps": [_chunk(step, zero_ns) for step in timeline.steps],
        "phases": [_span(span, zero_ns) for span in (*timeline.before, *timeline.path)],
        "held": held,
        "workers": [_worker(worker, zero_ns) for worker in timeline.workers],
    }


def _worker(worker: WorkerSpans, zero_ns: int) -> dict[str, Any]:
    return {
        "place": worker.load.process.place,
        "host": worker.load.process.host,
        **worker.load.figures,
        "stages": [_span(span, zero_ns) for span in worker.spans],
        "chunks": [_chunk(chunk, zero_ns) for chunk in worker.chunks],
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
