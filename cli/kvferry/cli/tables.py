"""Tables for terminals. rich is needed only here and in `plan.tables`: the extra `cli` brings it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from kvferry.cli.arguments import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


WIDTH = 132


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
