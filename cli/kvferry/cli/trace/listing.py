"""The tables of `kvferry trace`: durations of each phase, and the slowest handovers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TextIO

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.trace.report import (
    Report,
    format_engines,
    format_lasted,
    format_missing,
    format_result,
    format_time,
    name_of,
)
from kvferry.cli.trace.theme import label_of
from kvferry.trace.timeline import Timeline

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def print_listing(stream: TextIO, report: Report, slowest: int) -> None:
    """Print tables if rich is installed, else plain columns."""
    print(_safe(report.headline), end="\n\n", file=stream)
    _print_table(stream, ("phase", ">times", ">p50", ">p99", ">longest", "what it is"), report.phase_rows())
    print("\nthe slowest handovers:\n", file=stream)
    _print_table(
        stream,
        ("request", "engines", ">tokens", ">handover", "longest phase", "result"),
        (_row(one) for one in report.timelines[:slowest]),
    )
    for note in report.notes:
        print(f"\n{_safe(note)}", file=stream)


def _row(one: Timeline) -> tuple[str, ...]:
    longest = max(one.path, key=lambda span: span.lasted_ns, default=None)
    return (
        name_of(one, 30),
        format_engines(one),
        str(one.handover.tokens or "–"),
        format_lasted(one),
        f"{label_of(longest.phase)} {format_time(longest.lasted_ns)}" if longest else "–",
        "; ".join(filter(None, (format_result(one), format_missing(one)))),
    )


def _safe(content: str) -> str:
    """The text with terminal control characters replaced."""
    return _CONTROL.sub("\ufffd", content)


def _print_table(stream: TextIO, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    cells = [[_safe(cell) for cell in row] for row in rows]
    try:
        from kvferry.cli.formatting import console, new_table

        out = console(stream)
    except InvalidArgument:
        _print_columns(stream, columns, cells)
        return
    table = new_table(columns)
    for row in cells:
        table.add_row(*row)
    out.print(table)


def _print_columns(stream: TextIO, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    heads = [column.removeprefix(">") for column in columns]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for row in (heads, *cells):
        padded = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        print("  ".join(padded).rstrip(), file=stream)
