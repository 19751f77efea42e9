"""Formats of numbers, the same in tables and pictures, and tables for terminals."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.protocol.geometry import Range


WIDTH = 132
"""Of tables, if the output is no terminal."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def safe(content: str) -> str:
    """The text with terminal control characters replaced."""
    return _CONTROL.sub("\ufffd", content)


def print_line(content: str = "") -> None:
    """Print one `safe` line."""
    print(safe(content))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], styles: Mapping[str, str] | None = None) -> None:
    """Print `safe` cells as a table. Without rich (the extra `cli`) they are printed line by line, not aligned.

    Args:
        columns: their names; `>` in front aligns to the right.
        rows: a cell per column; a row without cells is an empty line.
        styles: rich's styles of cells that have this text.
    """
    cells = [[safe(cell) for cell in row] for row in rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for row in ([column.removeprefix(">") for column in columns], *cells):
            print("  ".join(row).rstrip())
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(table)


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
