"""Formats of numbers, the same in tables and pictures, and tables for terminals.

Only tables need rich, which the extra `cli` installs; `print_table` does without. This module needs no other package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from kvferry.cli.arguments import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvferry.protocol.geometry import Range


WIDTH = 132
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def new_table(columns: Iterable[str]) -> Table:
    """A table with these columns; `>` in front aligns to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


def console(stream: TextIO) -> Console:
    """A console that writes to a stream.

    Raises:
        InvalidArgument: rich is not installed; the text says what to do.
    """
    try:
        from rich.console import Console
    except ImportError:
        raise InvalidArgument("output", "a table", "rich (pip install 'kvferry[cli]'), or --json") from None
    width = None if stream.isatty() else WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def safe(content: str) -> str:
    """The text with terminal control characters replaced."""
    return _CONTROL.sub("\ufffd", content)


def print_table(
    stream: TextIO, columns: Sequence[str], rows: Iterable[Sequence[str]], styles: Mapping[str, str] | None = None
) -> None:
    """Print `safe` cells as a table if rich is installed, else as plain columns.

    Args:
        columns: as for `new_table`.
        styles: rich's style of cells that have this text.
    """
    cells = [[safe(cell) for cell in row] for row in rows]
    try:
        out = console(stream)
    except InvalidArgument:
        _print_columns(stream, columns, cells)
        return
    from rich.text import Text

    table = new_table(columns)
    for row in cells:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
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
