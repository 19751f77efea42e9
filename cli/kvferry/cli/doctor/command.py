"""`kvferry doctor`: runs the checks and prints the findings."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from kvferry.cli.arguments import InvalidArgument, number_option, whole_option
from kvferry.cli.doctor.examination import examine
from kvferry.cli.doctor.findings import Finding, Mark

SCHEMA = 1
_COLOURS = {Mark.OK: "green", Mark.LOOK: "yellow", Mark.BROKEN: "bold red", Mark.NOT_DONE: "dim"}


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if anything is broken. Raises `InvalidArgument`."""
    ranks = whole_option("--data-parallel-size", options.data_parallel_size, 1, 1024)
    timeout_s = number_option("--timeout", options.timeout, 0.1, 600)
    findings = examine(os.environ, ranks, timeout_s)
    healthy = all(finding.mark is not Mark.BROKEN for finding in findings)
    if options.json:
        print(json.dumps(as_json(findings), indent=2, ensure_ascii=False))
    else:
        print_findings(sys.stdout, findings)
    return 0 if healthy else 1


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The whole answer as plain values."""
    return {
        "kvferry_doctor": SCHEMA,
        "broken": any(finding.mark is Mark.BROKEN for finding in findings),
        "findings": [
            {"check": one.check, "mark": one.mark.value, "found": one.found, "do": one.do} for one in findings
        ],
    }


def print_findings(stream: TextIO, findings: Sequence[Finding]) -> None:
    """Print a table if rich is installed, else plain lines: the command must work on any machine."""
    try:
        _print_table(stream, findings)
    except (InvalidArgument, ImportError):
        for one in findings:
            print(
                f"{one.mark.value:<8}  {one.check}: {one.found}{f'{chr(10)}          → {one.do}' if one.do else ''}",
                file=stream,
            )
    counts = Counter(one.mark for one in findings)
    print("\n" + ", ".join(f"{counts[mark]} {mark.value}" for mark in Mark if counts[mark]), file=stream)


def _print_table(stream: TextIO, findings: Sequence[Finding]) -> None:
    from kvferry.cli.formatting import console

    out = console(stream)
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for one in findings:
        text = Text(one.found)
        if one.do:
            text.append(f"\n→ {one.do}")
        table.add_row(Text(one.mark.value, style=_COLOURS[one.mark]), one.check, text)
    out.print(table)
