"""How far a benchmark of real engines is, and what ended a part of it."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.serve_load import Tick


def progress_bars() -> Progress:
    """On standard error, to be entered."""
    columns = (TextColumn("{task.description:58}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def shown(progress: Progress, title: str, total: int) -> tuple[Callable[[str], None], Tick]:
    """Callbacks for each part's name, and for each request."""
    task = progress.add_task(title, total=total)

    def tell(part: str) -> None:
        progress.update(task, description=f"{title}: {part}")
        if not progress.console.is_terminal:
            progress.console.print(f"{title}: {part}")

    return tell, lambda: progress.advance(task)


def short(error: Exception) -> str:
    """An error in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' … '.join([*lines[:1], *lines[-3:]] if len(lines) > 4 else lines)}"[:1000]
