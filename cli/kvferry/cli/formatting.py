"""Numbers as tables and pictures show them, with at most three significant digits, and text and tables for terminals.

Output is as wide as the terminal, or `COLUMNS`; 80 columns if it goes elsewhere.
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

    from kvferry.protocol.geometry import Interleave, Range


# If the output is no terminal, and there is no variable COLUMNS.
WIDTH = 80
# Narrower columns fold numbers in the middle.
_COLUMN_WIDTH = 10


def terminal() -> Console:
    """Standard output, with colours if it is a terminal."""
    # Imported when something is printed, so that `kvferry doctor --json` can say that the package is missing.
    from rich.console import Console

    width = WIDTH
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        width = shutil.get_terminal_size((WIDTH, 24)).columns
    # With a width but no height rich reads COLUMNS itself.
    return Console(width=width, height=24, highlight=False)


def show_live(text: str) -> None:
    """Show a line on standard error in place of the last one, if that is a terminal; "" ends it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)


def _print(content: RenderableType, min_width: int = 0) -> None:
    """Print at least that wide, without blanks at the ends of lines."""
    console = terminal()
    console.width = max(console.width, min_width)
    # Captured and written here: at a broken pipe rich itself would exit.
    with console.capture() as captured:
        console.print(content)
    console.file.writelines(
        f"{line.rstrip()}\n" for line in captured.get().splitlines()
    )


def print_line(content: str = "", style: str = "", *, hang: int = 0) -> None:
    """Print one `visible` line, wrapped between words; the lines after the first begin with `hang` spaces."""
    from rich.text import Text

    # Long words stay whole, so that paths can be copied.
    wrapper = textwrap.TextWrapper(
        terminal().width,
        subsequent_indent=" " * hang,
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = wrapper.wrap(visible(content))
    _print(Text("\n".join(lines), style), max(map(len, lines), default=0))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print `visible` cells as a table.

    The first column is as wide as its cells. Each other one has `_COLUMN_WIDTH` letters on average, as far as `WIDTH`
    goes, also on a terminal that is narrower.

    Args:
        columns: their names; `>` in front aligns to the right.
        rows: a cell per column; a row without cells is an empty line.
        styles: rich's styles of cells that begin with this word.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for column in columns:
        justify: Literal["left", "right"] = (
            "right" if column.startswith(">") else "left"
        )
        # A worker's name is not broken; the other columns give way.
        is_first = not table.columns
        table.add_column(
            column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=is_first
        )
    first_width = 0
    for row in rows:
        cells = [visible(cell) for cell in row]
        table.add_row(*(Text(cell, _style_of(cell, styles or {})) for cell in cells))
        if cells:
            first_width = max(first_width, len(cells[0]))
    _print(table, min(WIDTH, first_width + _COLUMN_WIDTH * (len(columns) - 1)))


def _style_of(cell: str, styles: Mapping[str, str]) -> str:
    for word, style in styles.items():
        if cell.startswith(word):
            return style
    return ""


_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def digits(value: float) -> str:
    """A number with three significant digits, without an exponent: `0.0123`, `12.3`, `12300`."""
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        # `g` would write large numbers with an exponent.
        return f"{rounded:.0f}"
    return f"{rounded:g}"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    """A value in the smallest of these units in which it is below `step`."""
    for unit in units[:-1]:
        # Before rounding, which makes 1020 of 1024, and after it: 999.9 KB is 1 MB, and not 1000 KB.
        if max(value, float(digits(value))) < step:
            return f"{digits(value)} {unit}"
        value /= step
    return f"{digits(value)} {units[-1]}"


def rounded_count(number: float) -> str:
    """A large number: `988`, `16.4k`, `1.05M`."""
    return _scaled(number, 1000, ("", "k", "M", "G", "T")).replace(" ", "")


def format_time(nanoseconds: float) -> str:
    """`85 µs`, `4.21 ms`, `1.3 s`, `12 min`."""
    for unit, size in (("µs", 1e3), ("ms", 1e6)):
        if nanoseconds < 999.5 * size:
            return f"{nanoseconds / size:.3g} {unit}"
    if nanoseconds < 600e9:
        return f"{nanoseconds / 1e9:.3g} s"
    return f"{nanoseconds / 60e9:.0f} min"


def spans(ranges: Iterable[Range]) -> str:
    """Several half-open ranges: `0…3, 5`."""
    return ", ".join(map(span, ranges))


def span(held: Range) -> str:
    """A half-open range by its first and last: `0…3`, `5`, or a dash."""
    if not len(held):
        return "–"
    if len(held) == 1:
        return f"{held.start}"
    return f"{held.start}…{held.stop - 1}"


def decimal_bytes(num_bytes: float) -> str:
    """Bytes on a link: `1.07 GB`."""
    return _scaled(num_bytes, 1000, _DECIMAL)


def binary_bytes(num_bytes: float) -> str:
    """Sizes of memory: `16 KiB`, `1.5 GiB`."""
    return _scaled(num_bytes, 1024, _BINARY)


def format_tokens(interleave: Interleave) -> str:
    """The tokens that a worker holds: `all`, or `rank 1 of 2, 16 in a row`."""
    if interleave.ranks == 1:
        return "all"
    return f"rank {interleave.rank} of {interleave.ranks}, {interleave.run_tokens} in a row"
