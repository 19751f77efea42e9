"""The GPU check's results: a table at the end, and a report as JSON and as Markdown."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.provenance import checkout, circumstances
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.accuracy.settings import ROOT
from scripts.gpu_check.judging import Mark
from scripts.gpu_check.machine import Gpu
from scripts.gpu_check.running import Done

SCHEMA = 1
_STYLES = {"ok": "green", "look": "yellow", "FAILED": "bold red", "skipped": "dim"}
_COLUMNS = ("part", "result", "found", "MiB in use before, most, after", "s")


def verdict(done: Sequence[Done]) -> int:
    """Exit status: 0 when a part was run and none failed."""
    marks = {one.verdict.mark for one in done}
    return 0 if marks - {Mark.SKIPPED} and Mark.FAILED not in marks else 1


def report_of(done: Sequence[Done], gpus: Sequence[Gpu], device: str, *, quick: bool) -> dict[str, Any]:
    """The whole report as plain values, without the names of this host and of its users' folders."""
    parts = [
        {
            "name": one.planned.part.name,
            "mark": one.verdict.mark.value,
            "found": one.verdict.found,
            "seconds": round(one.seconds, 1),
            "gpus": one.planned.gpus,
            "command": one.planned.part.shell_line,
            "memory": one.memory.lines(),
            "results": one.results,
            "log": one.log,
        }
        for one in done
    ]
    found: dict[str, Any] = _without_names(
        {
            "kvferry_gpu_check": SCHEMA,
            "passed": verdict(done) == 0,
            "device": device,
            "quick": quick,
            **circumstances(str(checkout())),
            "gpus": [asdict(gpu) for gpu in gpus],
            "parts": parts,
        }
    )
    return found


def _without_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_names(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_names(one) for one in value]
    if not isinstance(value, str):
        return value
    for path, instead in ((ROOT, "."), (Path.home(), "~")):
        value = value.replace(str(path), instead) if len(path.parts) > 1 else value
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", value)


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (one["name"], one["mark"], one["found"], "; ".join(one["memory"]), f"{one['seconds']:.0f}")
        for one in report["parts"]
    ]


def show(report: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = Table(title="GPU check", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column in ("part", "result"))
    for name, mark, *cells in _rows(report):
        table.add_row(escape(name), f"[{_STYLES[mark]}]{mark}[/]", *map(escape, cells))
    console.print(table)


def markdown(report: dict[str, Any]) -> str:
    """The table for an issue, with the machine before it, and after it the commands, and the logs of what failed."""
    machine, versions = report["machine"], report["versions"]
    lines = [
        f"# GPU check of kvferry: {'passed' if report['passed'] else 'FAILED'}{', quick form' * report['quick']}",
        "",
        f"{report['date']}, commit {report['commit']}",
        "",
        f"- {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}",
        *(
            f"- {gpu['name']}: {gpu['model']}, {gpu['total_gib']:.0f} GiB, {gpu['capability']}, driver {gpu['driver']}"
            for gpu in report["gpus"]
            if report["device"] == "cuda"
        ),
        f"- {', '.join(f'{name} {version}' for name, version in versions.items())}",
        "",
        *(
            f"| {' | '.join(cell.replace('|', '∣') for cell in row)} |"
            for row in (_COLUMNS, ["---"] * len(_COLUMNS), *_rows(report))
        ),
    ]
    for one in report["parts"]:
        if one["mark"] != Mark.SKIPPED.value:
            lines += ["", f"{one['name']}: `{one['command']}`"]
        if one["log"]:
            lines += ["", "```text", one["log"].replace("```", "'''"), "```"]
    return "\n".join([*lines, ""])
