"""Output and end of this folder's commands: lines with the elapsed time, a table of results, short paths, one way to be
stopped. Standard library only until there is something to show."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TextIO

STOPPED = "stopped; everything that was started has been ended"
_STYLES = {
    "ok": "green",
    "look": "yellow",
    "FAILED": "bold red",
    "NOT RUN": "bold yellow",
    "skipped": "dim",
}


class Progress:
    """Says what is being done, with the seconds since it was made."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """One line."""
        print(f"[{self.elapsed_s:6.1f} s] {text}", flush=True)


def show_results(
    title: str,
    rows: Iterable[tuple[str, str, str]],
    figures: Mapping[str, str] = MappingProxyType({}),
    file: TextIO | None = None,
) -> None:
    """Print a table of results, for terminals of 80 columns as well.

    Args:
        rows: name, one of the results of `_STYLES`, what was found.
        figures: shown below, without a result.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=file, width=None if sys.stdout.isatty() else 80)
    table = Table(
        title=escape(title),
        title_justify="left",
        box=box.HORIZONTALS,
        padding=0,
        pad_edge=False,
    )
    for name in ("check", "result"):
        table.add_column(name, no_wrap=True)
    table.add_column("found", overflow="fold")
    for name, result, found in rows:
        table.add_row(escape(name), f"[{_STYLES[result]}]{result}[/]", escape(found))
    table.add_section()
    for name, value in figures.items():
        table.add_row(escape(name), "", escape(value))
    console.print(table)


def shown(path: Path) -> str:
    """A path from the working directory, or whole where it is elsewhere."""
    return (
        f"./{path.relative_to(Path.cwd())}"
        if path.is_relative_to(Path.cwd())
        else str(path)
    )


def raise_when_stopped() -> None:
    """From now on signals that ask this process to stop raise `KeyboardInterrupt` wherever it is.

    SIGINT too: asyncio's own handler would wait for the next await, and engines are awaited without one.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
