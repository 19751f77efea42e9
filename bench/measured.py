"""The files in `results/` as values: what a benchmark said, and the circumstances that it was measured in.

A file without the common keys is an older one, and is left out. A quick run is refused: it is for orientation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import Chart, Limit, Results, Series, Table, Target
from bench.provenance import REPOSITORY, blind_spot, is_in_history, is_one_commit

COMMANDS = {
    "serve": "python -m bench.serve",
    "engine_contact": "python -m bench.engine_contact",
    "step": "python -m bench.step",
    "transfer": "python -m bench.transfer",
    "handover": "python -m bench.handover",
    "first_contact": "python -m bench.first_contact",
    "scale": "python -m bench.scale",
    "ucx": "python -m bench.ucx",
    "relayout": "python -m bench.relayout",
    "plan": "python -m bench.plan",
    "soak": "python -m bench.soak --requests 50000",
    "trace_cost": "python -m bench.trace_cost",
}
"""Of the benchmarks. Chapters are in this order, by the first key that a result's name begins with, then by name."""


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


def unpublished(found: Sequence[Measured]) -> dict[str, str]:
    """Benchmarks without a result among these, with their commands."""
    return {name: command for name, command in COMMANDS.items() if not any(one.name.startswith(name) for one in found)}


def require_commits(found: Sequence[Measured], root: Path = REPOSITORY) -> str | None:
    """Check that each result is of one clean commit that HEAD of the repository at `root` contains.

    Returns:
        In words which results could not be checked, and why; None if all were.

    Raises:
        NotPublishable: some are not; the text names each file, its commit and the command that measures it anew.
    """
    blind = blind_spot(root)
    others = [one for one in found if not is_in_history(one.commit, root)]
    refused = [one for one in others if not (blind and is_one_commit(one.commit))]
    if refused:
        raise NotPublishable(
            "\n".join(
                f"{one.name}.json is of commit {one.commit!r}, expected a clean commit in the history of HEAD: "
                f"run `{one.results.command}` on one, or delete the file"
                for one in refused
            )
        )
    return f"commits not checked of {', '.join(one.name for one in others)}: {blind}" if others else None


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
    return next((index for index, first in enumerate(COMMANDS) if name.startswith(first)), len(COMMANDS))
