"""The output of `kvferry trace`: tables of the phases and of the slowest handovers, or JSON."""

from __future__ import annotations

from typing import Any

from kvferry.cli.formatting import print_line, print_table
from kvferry.cli.trace.report import (
    Report,
    format_engines,
    format_lasted,
    format_missing,
    format_result,
    format_time,
    name_of,
)
from kvferry.trace.timeline import Span, Timeline

SCHEMA = 1


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
        "lease": {"boot": handover.lease.boot, "epoch": handover.lease.epoch} if handover.lease else None,
        "tokens": handover.tokens,
        "outcome": one.outcome,
        "missing": list(one.missing),
        "zero_ns": one.zero_ns,
        "handover_ms": None if one.lasted_ns is None else one.lasted_ns / 1e6,
        "bytes": one.bytes,
        "gb_s": one.gb_s,
        "phases": [_span(span, one.zero_ns) for span in (*one.before, *one.path)],
        "held": _span(one.held, one.zero_ns) if one.held else None,
        "workers": [
            {
                "place": worker.load.process.place,
                "host": worker.load.process.host,
                "bytes": worker.load.ended.bytes,
                "staged_bytes": worker.load.ended.staged_bytes,
                "descriptors": worker.load.ended.descriptors,
                "relayout_ms": worker.load.ended.relayout_ns / 1e6,
                "reason": worker.load.ended.reason,
                "stages": [_span(span, one.zero_ns) for span in worker.spans],
            }
            for worker in one.workers
        ],
    }


def _span(span: Span, zero_ns: int) -> dict[str, Any]:
    """A span with its begin and end in milliseconds after the zero."""
    return {
        "phase": span.phase,
        "begun_ms": (span.begun_ns - zero_ns) / 1e6,
        "ended_ms": (span.ended_ns - zero_ns) / 1e6,
    }
