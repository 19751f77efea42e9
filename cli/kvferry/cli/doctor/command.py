"""`kvferry doctor`: runs the checks and prints the findings."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from kvferry.cli.arguments import number_option, whole_option
from kvferry.cli.doctor.channel import check_address, check_secret, check_telemetry
from kvferry.cli.doctor.devices import Machine, check_devices, this_machine
from kvferry.cli.doctor.efa import check_efa
from kvferry.cli.doctor.findings import Finding, Mark, not_done
from kvferry.cli.doctor.host import (
    check_files,
    check_huge_pages,
    check_locked_memory,
    check_processors,
    check_shared_memory,
)
from kvferry.cli.doctor.ucx import check_ucx
from kvferry.cli.doctor.versions import check_versions
from kvferry.cli.formatting import print_table

SCHEMA = 1
_COLOURS = {"ok": "green", "look": "yellow", "broken": "bold red", "not done": "dim"}


def _check_loopback(machine: Machine) -> Iterable[Finding]:
    from kvferry.cli.doctor.loopback import check_loopback  # needs msgspec, which may be missing

    return check_loopback(machine)


CHECKS: dict[str, Callable[[Machine], Iterable[Finding]]] = {
    "versions": check_versions,
    "GPUs and NICs": check_devices,
    "EFA": check_efa,
    "UCX settings": check_ucx,
    "locked memory": check_locked_memory,
    "open files": check_files,
    "shared memory": check_shared_memory,
    "processors": check_processors,
    "huge pages": check_huge_pages,
    "side channel": check_address,
    "secret": check_secret,
    "NIXL telemetry": check_telemetry,
    "loopback transfer": _check_loopback,
}
"""All checks in their order."""


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if anything is broken. Raises `InvalidArgument`."""
    ranks = whole_option("--data-parallel-size", options.data_parallel_size, 1, 1024)
    timeout_s = number_option("--timeout", options.timeout, 0.1, 600)
    machine = this_machine(os.environ, ranks, timeout_s)
    findings = list(examine(machine))
    healthy = all(finding.mark is not Mark.BROKEN for finding in findings)
    if options.json:
        print(json.dumps(as_json(findings), indent=2, ensure_ascii=False))
    else:
        print_findings(findings)
    return 0 if healthy else 1


def examine(machine: Machine) -> Iterator[Finding]:
    """The findings of all checks. One that fails does not end the others."""
    for name, check in CHECKS.items():
        try:
            yield from check(machine)
        except Exception as error:  # noqa: BLE001 - any error of one check
            yield not_done(name, f"{type(error).__name__}: {error}")


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The whole answer as plain values."""
    return {
        "kvferry_doctor": SCHEMA,
        "broken": any(finding.mark is Mark.BROKEN for finding in findings),
        "findings": [{**asdict(one), "mark": one.mark.value} for one in findings],
    }


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings, each with its remedy in the row below, and the number of each mark."""
    rows: list[tuple[str, str, str]] = []
    for one in findings:
        rows.append((one.mark.value, one.check, one.found))
        if one.do:
            rows.append(("", "", f"→ {one.do}"))
    print_table(("", "check", "found, and what to do"), rows, _COLOURS)
    counts = Counter(one.mark for one in findings)
    print("\n" + ", ".join(f"{counts[mark]} {mark.value}" for mark in Mark if counts[mark]))
