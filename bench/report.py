"""docs/performance.md and its charts from the results that are in the repository.

    python -m bench.report               # writes docs/performance.md and docs/figures/*.svg
    python -m bench.report --into DIR    # elsewhere, to look at

It measures nothing: the benchmarks write bench/results/*.json, and this draws what they wrote, the same bytes every
time. It refuses the file of a quick run, and a result whose commit is not a clean one in the history of HEAD.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.charts import svg_of
from bench.figures import RESULTS, Cell, Chart, Results, Series, Table, Target, shown
from bench.provenance import REPOSITORY, is_in_history

DOCS = REPOSITORY / "docs"
COMMANDS = {
    "serve": "python -m bench.serve",
    "engine_contact": "python -m bench.engine_contact",
    "step": "python -m bench.step",
    "transfer": "python -m bench.transfer",
    "handover": "python -m bench.handover",
    "stream": "python -m bench.stream",
    "prefix_step": "python -m bench.prefix_step",
    "prefix": "python -m bench.prefix",
    "scale": "python -m bench.scale",
    "link": "python -m bench.link",
    "sleep": "python -m bench.sleep",
    "connections": "python -m bench.connections",
    "relayout": "python -m bench.relayout",
    "plan": "python -m bench.plan",
    "soak": "python -m bench.soak --requests 50000",
}
"""Of the benchmarks, in the order of the chapters: a result belongs to the one that its name begins with."""

_MOST_ROWS = 6
"""Of a chapter's first table: longer ones, and all others, are in the JSON alone."""
_HEAD = """\
<!-- Written by `python -m bench.report` from bench/results/*.json, and compared by a test: do not edit. -->

# Performance

Figures are medians, and charts show the range, unless they say otherwise. A benchmark and what it is compared with ran
in the same run. Every chapter links to its JSON, which has all tables, the machine, the versions and the commit.
[bench/README.md](../bench/README.md) says how each benchmark measures, [missed-targets.md](missed-targets.md) why a
target is missed.

**Chapters whose names end in `-cuda` ran on one NVIDIA H200, without vLLM; all others ran on CPUs.** vLLM engines have
not been measured on a GPU: [gpu-check.md](gpu-check.md) says what ran on one, and how to measure yours.
"""


class NotPublishable(Exception):
    """A file in `results/` that must not get into the docs; the text says which and what to do."""


@dataclass(frozen=True)
class Measured:
    """One file: `name` is that of the file without its ending."""

    name: str
    results: Results
    date: str
    commit: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def circumstances(self) -> str:
        """In a sentence."""
        of = self.machine
        gpu = f", {of['gpu']}" if of.get("gpu") else ""
        versions = ", ".join(
            f"{name} {version}" for name, version in self.versions.items()
        )
        return (
            f"Measured {self.date} at commit `{self.commit}` on {of['processor']}, {of['cores']} cores, "
            f"{of['memory_gb']} GB{gpu}, {of['system']}, load {of.get('load_at_start', '–')} before and "
            f"{of['load']} at the end; {versions}."
        )


def read_all(folder: Path) -> list[Measured]:
    """Everything that can be published, in the order of the chapters.

    Raises:
        NotPublishable: a file is of a quick run, or is not what `bench.figures` writes.
    """
    order = list(COMMANDS)
    return sorted(
        map(_read, folder.glob("*.json")),
        key=lambda one: (order.index(_benchmark(one.name)), one.name),
    )


def require_commits(found: Sequence[Measured], root: Path = REPOSITORY) -> list[str]:
    """Check that each result is of one clean commit that HEAD of the repository at `root` contains.

    Returns:
        The results that git cannot check here: in a shallow clone, or without a repository.

    Raises:
        NotPublishable: some are not; the text names each file, its commit and the command that measures it anew.
    """
    verdicts = {one.name: is_in_history(one.commit, root) for one in found}
    refused = [
        f"{one.name}.json is of commit {one.commit!r}, expected a clean commit in the history of HEAD: "
        f"run `{one.results.command}` on one, or delete the file"
        for one in found
        if verdicts[one.name] is False
    ]
    if refused:
        raise NotPublishable("\n".join(refused))
    return [name for name, verdict in verdicts.items() if verdict is None]


def rendered(results: Path) -> dict[str, str]:
    """Every file of the report, by its path within the docs.

    Raises:
        NotPublishable: see `read_all`.
    """
    found = read_all(results)
    lines = [
        _HEAD,
        *_summary(found),
        *(line for one in found for line in _chapter(one)),
    ]
    files = {"performance.md": "\n".join(lines).rstrip() + "\n"}
    for one in found:
        for number, chart in enumerate(one.results.charts, 1):
            files[f"figures/{one.name}-{number}.svg"] = svg_of(chart)
        if one.name == "serve":
            files["figures/handover.svg"] = svg_of(one.results.charts[0].of_medians())
    return files


def write_report(results: Path, docs: Path) -> None:
    """Write them, and remove charts that are no longer drawn."""
    files = rendered(results)
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    for old in (docs / "figures").glob("*.svg"):
        old.unlink()
    for name, text in files.items():
        (docs / name).write_text(text)


def _read(path: Path) -> Measured:
    given = json.loads(path.read_text())
    if given.get("quick"):
        raise NotPublishable(
            f"{path.name} is of a quick run: run `{given['command']}` without --quick, or delete it"
        )
    try:
        if not _benchmark(path.stem):
            raise ValueError(f"none of {', '.join(COMMANDS)}")
        results = Results(
            command=given["command"],
            what=given["what"],
            tables=tuple(Table(**one) for one in given["tables"]),
            charts=tuple(
                Chart(
                    **{
                        **one,
                        "series": tuple(Series(**series) for series in one["series"]),
                    }
                )
                for one in given["charts"]
                if any(y is not None for series in one["series"] for y in series["y"])
            ),
            targets=tuple(Target(**one) for one in given["targets"]),
            notes=tuple(given["notes"]),
        )
        return Measured(
            path.stem,
            results,
            given["date"],
            given["commit"],
            given["machine"],
            given["versions"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise NotPublishable(
            f"{path.name} is not what bench.figures.publish writes: {error!r}"
        ) from error


def _benchmark(name: str) -> str:
    """The one that a file name begins with; empty for none."""
    return next((benchmark for benchmark in COMMANDS if name.startswith(benchmark)), "")


def _summary(found: Sequence[Measured]) -> list[str]:
    targets = sorted(
        ((one, target) for one in found for target in one.results.targets),
        key=lambda pair: pair[1].met,
    )
    lines = [
        f"{sum(target.met for _, target in targets)} of {len(targets)} targets are met:",
        "",
    ]
    rows = [
        [
            "met" if target.met else "**missed**",
            f"[{one.name}](#{one.name}): {target.name}",
            f"{shown(target.measured)} {target.unit}".rstrip(),
            f"{target.kind} {shown(target.limit)} {target.unit}".rstrip(),
            target.note,
        ]
        for one, target in targets
    ]
    lines += [*_markdown(["", "target", "measured", "limit", "note"], rows), ""]
    published = {_benchmark(one.name) for one in found}
    commands = [
        f"`{command}`" for name, command in COMMANDS.items() if name not in published
    ]
    if commands:
        lines += [
            "Not published, for lack of a run of a commit of this repository:",
            f"{', '.join(commands)}.",
            "",
        ]
    return lines


def _chapter(one: Measured) -> list[str]:
    results = one.results
    source = (
        f"`{results.command}` → [{one.name}.json](../bench/results/{one.name}.json)."
    )
    lines = [
        f"## {one.name}",
        "",
        results.what,
        "",
        f"{source} {one.circumstances}",
        "",
    ]
    for number, chart in enumerate(results.charts, 1):
        lines += [f"![{_plain(chart.title)}](figures/{one.name}-{number}.svg)", ""]
    for table in results.tables[:1]:
        if len(table.rows) <= _MOST_ROWS:
            lines += [*_markdown(table.columns, table.rows), ""]
    return [*lines, *(f"- {note}" for note in results.notes), ""]


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(_plain(shown(cell)) for cell in line)} |" for line in lines]


def _plain(text: str) -> str:
    """Without what would end a cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Returns 1 if a file cannot be published."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder of the JSON files"
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=DOCS,
        help="the folder of performance.md and figures/",
    )
    chosen = parser.parse_args()
    try:
        not_checked = require_commits(read_all(chosen.results))
        write_report(chosen.results, chosen.into)
    except NotPublishable as refused:
        print(refused, file=sys.stderr)
        return 1
    if not_checked:
        print(
            f"git cannot check the commits of {', '.join(not_checked)} here",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
