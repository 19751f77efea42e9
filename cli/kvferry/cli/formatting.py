"""Formats of numbers, the same in tables and pictures, and tables for terminals."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.protocol.geometry import Range


WIDTH = 132
"""Of tables, if the output is no terminal."""
_LEAST = 20
_GAP = "   "
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def safe(content: str) -> str:
    """The text with terminal control characters replaced."""
    return _CONTROL.sub("\ufffd", content)


def print_line(content: str = "") -> None:
    """Print one `safe` line."""
    print(safe(content))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print `safe` cells in columns; the last column is folded at the width of the terminal.

    Args:
        columns: their names; `>` in front aligns to the right.
        rows: a cell per column; a row without cells is an empty line.
    """
    heads = [column.removeprefix(">") for column in columns]
    cells = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *filter(None, cells), strict=True)]
    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    last = max(_LEAST, width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1))
    widths[-1] = min(widths[-1], last)

    def print_row(row: Sequence[str]) -> None:
        padded = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        print(_GAP.join(padded).rstrip())

    print_row(heads)
    print("─" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
    for row in cells:
        if not row:
            print()
            continue
        *before, content = row
        for line in textwrap.wrap(content, last, break_on_hyphens=False) or [""]:
            print_row([*before, line])
            before = [""] * len(before)


_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < step:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def spans(held: Iterable[Range]) -> str:
    """Several half-open ranges: `0…3, 5`."""
    return ", ".join(span(one) for one in held)


def span(held: Range) -> str:
    """A half-open range by its first and last: `0…3`, `5`, or a dash."""
    if not len(held):
        return "–"
    return f"{held.start}" if len(held) == 1 else f"{held.start}…{held.stop - 1}"


def decimal_bytes(num_bytes: float) -> str:
    """Bytes on a link: `1.07 GB`."""
    return _scaled(num_bytes, 1000, _DECIMAL)


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def binary_bytes(num_bytes: float) -> str:
    """Sizes of memory: `16 KiB`, `1.5 GiB`."""
    return _scaled(num_bytes, 1024, _BINARY)
