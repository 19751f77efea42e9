"""Tables of Markdown. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    """A table with these columns, separated by `|` in one text. Bars within cells are escaped."""
    names = [name.strip() for name in columns.split("|")]
    return "\n".join(_line(row) for row in (names, ["---"] * len(names), *rows))


def _line(cells: Iterable[object]) -> str:
    texts = [str(cell).replace("|", "\\|") for cell in cells]
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)
