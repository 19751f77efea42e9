"""The files in `results/` as values: what a benchmark said, and the circumstances that it was measured in.

A file without the common keys is an older one, and is left out. A quick run is refused: it is for orientation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import Chart, Limit, Results, Series, Table, Target

ORDER = (
    "serve",
    "engine_contact",
    "step",
    "transfer",
    "handover",
    "first_contact",
    "scale",
    "ucx",
    "relayout",
    "plan",
    "soak",
)
"""Of the chapters: by the first of these that a name begins with, then by name."""


class NotPublishable(Exception):
    """A file in `results/` that must not get into the docs; the text says which and what to do."""


@dataclass(frozen=True)
class Measured:
    """One file: `name` is that of the benchmark, and of the file without its ending."""

    name: str
    results: Results
    date: str
    commit: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def where(self) -> str:
        """The machine in words."""
        of = self.machine
        gpu = f", {of['gpu']}" if of.get("gpu") else ""
        return f"{of['processor']}, {of['cores']} cores, {of['memory_gb']} GB{gpu}, {of['system']}"


def read_all(folder: Path) -> list[Measured]:
    """Everything that can be published, in the order of the chapters.

    Raises:
        NotPublishable: a file is of a quick run, or is not what `bench.figures` writes.
    """
    found = [one for path in sorted(folder.glob("*.json")) if (one := read(path)) is not None]
    return sorted(found, key=lambda one: (_place(one.name), one.name))


def read(path: Path) -> Measured | None:
    """One file; None if it has not the common keys."""
    given = json.loads(path.read_text())
    if "what" not in given:
        return None
    if given.get("quick"):
        raise NotPublishable(f"{path.name} is of a quick run: run `{given['command']}` without --quick, or delete it")
    try:
        results = Results(
            command=given["command"],
            what=given["what"],
            tables=tuple(Table(**one) for one in given["tables"] if one["rows"]),
            charts=tuple(_chart(one) for one in given["charts"] if _has_points(one)),
            targets=tuple(Target(**one) for one in given["targets"]),
            notes=tuple(given["notes"]),
            raw=given.get("raw", {}),
        )
        return Measured(path.stem, results, given["date"], given["commit"], given["machine"], given["versions"])
    except (KeyError, TypeError, ValueError) as error:
        raise NotPublishable(f"{path.name} is not what bench.figures.publish writes: {error!r}") from error


def _has_points(chart: Mapping[str, Any]) -> bool:
    """Whether anything of it was measured; the rest is left out, as tables without rows are."""
    return any(y is not None for series in chart["series"] for y in series["y"])


def _chart(given: Mapping[str, Any]) -> Chart:
    series = tuple(Series(**one) for one in given["series"])
    limits = tuple(Limit(**one) for one in given.get("limits", ()))
    return Chart(**{**given, "series": series, "limits": limits})


def _place(name: str) -> int:
    return next((index for index, first in enumerate(ORDER) if name.startswith(first)), len(ORDER))
