"""Figures that a page quotes from the results, and whether they are still those.

A page says where a figure comes from with a comment right behind it, which readers do not see:

    a handover takes 12.1 ms<!-- measured in serve: handover minus one decode step, p50 -->
    it reads 7.9 GB/s<!-- measured in transfer: GB/s by size | 16 | kvferry -->

Before the colon is the JSON's name; after it the name of a target, or a table's title, the first cell of a row and a
column. The last number before the comment is compared, with as many digits as it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.figures import Cell, Results, shown
from bench.measured import Measured

_QUOTE = re.compile(r"(-?\d[\d,]*(?:\.\d+)?)([^\d\n]{0,40}?)<!-- measured in ([\w-]+): (.+?) -->")


@dataclass(frozen=True)
class Quote:
    """A figure as a page has it, and what it refers to."""

    text: str
    name: str
    reference: str

    def problem(self, found: Sequence[Measured]) -> str | None:
        """Why it does not hold; None if it does."""
        results = next((one.results for one in found if one.name == self.name), None)
        if results is None:
            return f"{self.text}: there is no {self.name}.json with results"
        try:
            value = _value(results, self.reference)
        except LookupError as error:
            return f"{self.text}: {self.name}.json has no {error.args[0]}"
        if isinstance(value, str):
            # A cell of words, as "12.1 (10.9 … 14.0)": its first number counts.
            numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", value)
            value = float(numbers[0].replace(",", "")) if numbers else None
        decimals = len(self.text.partition(".")[2])
        quoted = float(self.text.replace(",", ""))
        if value is None or abs(quoted - value) > 0.5000001 * 10**-decimals:
            return f"{self.text}: {self.name}.json has {shown(value)} for {self.reference!r}"
        return None


def quotes_in(page: str) -> Iterator[Quote]:
    """All that a page marks."""
    for number, _, name, reference in _QUOTE.findall(page):
        yield Quote(number, name, reference)


def _value(results: Results, reference: str) -> Cell:
    parts = [part.strip() for part in reference.split("|")]
    if len(parts) == 1:
        for target in results.targets:
            if target.name == parts[0]:
                return target.measured
        raise LookupError(f"target {parts[0]!r}")
    title, row_name, column = parts
    for table in results.tables:
        if table.title == title:
            for row in table.rows:
                if shown(row[0]) == row_name:
                    return row[list(table.columns).index(column)] if column in table.columns else None
    raise LookupError(f"row {row_name!r} in a table {title!r}")
