"""The tables of `kvferry trace`: durations of each phase, and the slowest handovers."""

from __future__ import annotations

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
from kvferry.trace.timeline import Timeline


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
