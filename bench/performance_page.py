"""docs/performance.md from results: one screen that says what holds and what does not, then a chapter per benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bench.figures import Cell, Table, Target, shown
from bench.measured import Measured, unpublished

_HEAD = """\
<!-- Written by `python -m bench.report` from bench/results/*.json, and compared by a test: do not edit. -->

# Performance
"""
_METHOD = """\
Figures are medians with the range seen, unless they say otherwise. A benchmark and its comparison ran in the same
run. Each chapter has its command, its circumstances and its JSON with the samples;
[bench/README.md](../bench/README.md) says how each benchmark measures; [missed-targets.md](missed-targets.md) explains
missed targets."""


def page_of(found: Sequence[Measured]) -> str:
    """The whole page. Charts are expected as `figures/NAME-NUMBER.svg`. Benchmarks without results are named last."""
    parts = [_HEAD, _summary(found), *map(_chapter, found), _unpublished(found)]
    return "\n".join(parts)


def figure_name(name: str, number: int) -> str:
    """Of the SVG of a benchmark's chart; numbers count from 1."""
    return f"{name}-{number}.svg"


def _summary(found: Sequence[Measured]) -> str:
    missing = unpublished(found)
    machines = list(dict.fromkeys(one.where for one in found))
    contents: list[list[Cell]] = [
        [f"[{one.name}](#{one.name})", _in_short(one.results.what), one.date[:10], machines.index(one.where) + 1]
        for one in found
    ]
    lines = [_METHOD, ""]
    if missing:
        lines += [f"There is [no published run](#no-published-run) of {', '.join(missing)}.", ""]
    if len(machines) == 1:
        lines += [f"Machine: {machines[0]}.", ""]
        contents = [row[:-1] for row in contents]
        lines += _markdown(["", "what is measured", "measured"], contents)
    elif machines:
        lines += [f"Machines: {'; '.join(f'({number}) {where}' for number, where in enumerate(machines, 1))}.", ""]
        lines += _markdown(["", "what is measured", "measured", "machine"], contents)
    targets = [(one, target) for one in found for target in one.results.targets]
    if targets:
        missed = sum(not target.met for _, target in targets)
        rest = f"; {missed} missed, listed first" if missed else ""
        lines += ["", "## Targets", "", f"{len(targets) - missed} of {len(targets)} are met{rest}.", ""]
        rows: list[list[Cell]] = [
            [
                _verdict(target),
                target.name,
                _with_unit(target.measured, target.unit),
                _limit(target),
                f"[{one.name}](#{one.name})",
            ]
            for one, target in sorted(targets, key=lambda pair: pair[1].met)
        ]
        lines += _markdown(["", "target", "measured", "limit", "chapter"], rows)
    return "\n".join(lines) + "\n"


def _chapter(one: Measured) -> str:
    results = one.results
    lines = [f"## {one.name}", "", results.what, "", "```sh", results.command, "```", ""]
    if results.targets:
        rows = [
            [_verdict(target), target.name, _with_unit(target.measured, target.unit), _limit(target), target.note]
            for target in results.targets
        ]
        lines += [*_markdown(["", "target", "measured", "limit", "note"], rows), ""]
    for number, chart in enumerate(results.charts, 1):
        lines += [f"![{_plain(chart.title)}](figures/{figure_name(one.name, number)})", "", _source(one), ""]
    for table in results.tables:
        lines += [*_table(table), ""]
    lines += [f"- {note}" for note in results.notes]
    lines += [""] * bool(results.notes)
    return "\n".join([*lines, _circumstances(one), ""])


def _unpublished(found: Sequence[Measured]) -> str:
    missing = unpublished(found)
    if not missing:
        return ""
    head = ["## No published run", "", "These benchmarks have no results of a commit of this repository:", ""]
    return "\n".join([*head, "```sh", *missing.values(), "```", ""])


def _source(one: Measured) -> str:
    return f"<sub>`{one.results.command}` → [{one.name}.json](../bench/results/{one.name}.json)</sub>"


def _circumstances(one: Measured) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    load = [
        f"{one.machine[key]} {text}"
        for key, text in (("load_at_start", "before it"), ("load", "at its end"))
        if key in one.machine
    ]
    return f"Measured {one.date} at commit `{one.commit}` on {one.where}; load {', '.join(load)}; {versions}."


def _table(table: Table) -> list[str]:
    return [f"**{_plain(table.title)}**", "", *_markdown(table.columns, table.rows)]


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    """A table; columns of numbers are set to the right."""
    rows = list(rows)
    right = [bool(rows) and all(not isinstance(row[at], str) for row in rows) for at in range(len(columns))]
    lines = [columns, ["---:" if one else "---" for one in right], *rows]
    return [f"| {' | '.join(_plain(shown(cell, digits=3)) for cell in line)} |" for line in lines]


def _plain(text: str) -> str:
    """Without what would end a cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _verdict(target: Target) -> str:
    return "met" if target.met else "**missed**"


def _limit(target: Target) -> str:
    return f"{target.kind} {_with_unit(target.limit, target.unit)}"


def _with_unit(value: float | None, unit: str) -> str:
    return f"{shown(value)} {unit}".rstrip()


def _in_short(text: str) -> str:
    """The first sentence, up to its colon."""
    return re.split(r"(?<=[.?!]) |: ", text)[0]
