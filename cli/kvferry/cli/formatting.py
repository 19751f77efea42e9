"""Numbers as tables and pictures show them, with at most three significant digits, and text and tables for terminals.

Output is as wide as the terminal, or `COLUMNS`; 80 columns if it goes elsewhere. rich is imported when something is
printed, so that `kvferry doctor --json` can say that a package is missing.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from kvferry.protocol.visible import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvferry.protocol.geometry import Range


WIDTH = 80
"""If the output is no terminal, and there is no variable COLUMNS."""
_COLUMN = 10


def terminal(*, errors: bool = False) -> Console:
    """Standard output, or standard error, with colours if it is a terminal."""
    from rich.console import Console

    wide = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if wide else WIDTH
    return Console(
        width=width, height=24, stderr=errors, highlight=False
    )  # without both rich reads COLUMNS itself


def _print(content: RenderableType, least: int = 0) -> None:
    """Print at least that wide, without blanks at the ends of lines. Raises `BrokenPipeError`; rich itself exits."""
    console = terminal()
    console.width = max(console.width, least)
    with console.capture() as captured:
        console.print(content)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_line(content: str = "", style: str = "", *, hang: int = 0) -> None:
    """Print one `visible` line, wrapped between words; the lines after the first begin with `hang` spaces."""
    from rich.text import Text

    wrapper = textwrap.TextWrapper(
        terminal().width, subsequent_indent=" " * hang, break_on_hyphens=False
    )
    wrapper.break_long_words = False  # paths can be copied
    lines = wrapper.wrap(visible(content))
    _print(Text("\n".join(lines), style), max(map(len, lines), default=0))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], styles: Mapping[str, str] | None = None
) -> None:
    """Print `visible` cells as a table. The first column is as wide as its cells, and each other one has `_COLUMN`
    letters on average, as far as `WIDTH` goes, also on a terminal that is narrower.

    Args:
        columns: their names; `>` in front aligns to the right.
        rows: a cell per column; a row without cells is an empty line.
        styles: rich's styles of cells that begin with this word.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    styles, first = styles or {}, 0
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(
            column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=not table.columns
        )
    for row in rows:
        cells = [visible(cell) for cell in row]
        known = [
            next((styles[word] for word in styles if cell.startswith(word)), "") for cell in cells
        ]
        table.add_row(*(Text(cell, style) for cell, style in zip(cells, known, strict=True)))
        first = max(first, *map(len, cells[:1]))
    _print(table, min(WIDTH, first + _COLUMN * (len(columns) - 1)))


_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def digits(value: float) -> str:
    """A number with three significant digits, without an exponent: `0.0123`, `12.3`, `12300`."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if float(digits(value)) < step:
            return f"{digits(value)} {unit}"
        value /= step
    return f"{digits(value)} {units[-1]}"


def rounded_count(number: float) -> str:
    """A large number: `988`, `16.4k`, `1.05M`."""
    return _scaled(number, 1000, ("", "k", "M", "G", "T")).replace(" ", "")


def milliseconds(time_ms: float) -> str:
    """`22.2 ms`, `1.23 s`."""
    return f"{digits(time_ms)} ms" if time_ms < 999.5 else f"{digits(time_ms / 1000)} s"


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


def binary_bytes(num_bytes: float) -> str:
    """Sizes of memory: `16 KiB`, `1.5 GiB`."""
    return _scaled(num_bytes, 1024, _BINARY)
