"""`kvferry doctor`: runs the checks and prints the findings."""

from __future__ import annotations

import argparse
import functools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvferry.cli.arguments import number_option, whole_option
from kvferry.cli.doctor.channel import check_address, check_secret, check_telemetry
from kvferry.cli.doctor.devices import Machine, check_devices, check_efa, this_machine
from kvferry.cli.doctor.findings import MARKS, Finding, not_done
from kvferry.cli.doctor.host import (
    check_files,
    check_huge_pages,
    check_locked_memory,
    check_mapped_reads,
    check_processors,
    check_shared_memory,
)
from kvferry.cli.doctor.ucx import check_ucx
from kvferry.cli.doctor.versions import check_versions
from kvferry.cli.formatting import digits, print_line, print_table, show_live
from kvferry.protocol.visible import visible_json

if TYPE_CHECKING:
    from kvferry.cli.transfer.messages import Device

SCHEMA = 1
_SHOW_S = 0.2

Check = Callable[[Machine], Iterable[Finding]]


def _check_loopback(device: Device, machine: Machine) -> Iterable[Finding]:
    # Imported by the check alone: it needs msgspec, which may be missing, and the doctor must be able to say so.
    from kvferry.cli.doctor.loopback import check_loopback

    return check_loopback(machine, device)


# All checks in the order of their findings.
CHECKS: dict[str, Check] = {
    "versions": check_versions,
    "GPUs and NICs": check_devices,
    "EFA": check_efa,
    "UCX settings": check_ucx,
    "locked memory": check_locked_memory,
    "open files": check_files,
    "shared memory": check_shared_memory,
    "mapped reads": check_mapped_reads,
    "processors": check_processors,
    "huge pages": check_huge_pages,
    "side channel": check_address,
    "secret": check_secret,
    "NIXL telemetry": check_telemetry,
    "loopback DRAM": functools.partial(_check_loopback, "cpu"),
    "loopback VRAM": functools.partial(_check_loopback, "cuda"),
}


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if anything is broken.

    Raises:
        InvalidArgument: an option is invalid.
    """
    ranks = whole_option("--data-parallel-size", options.data_parallel_size, 1, 1024)
    timeout_s = number_option("--timeout", options.timeout, 0.1, 600)
    machine = this_machine(os.environ, ranks, timeout_s)
    try:
        findings = list(examine(machine, show_live))
    finally:
        show_live("")
    is_broken = any(finding.mark == "broken" for finding in findings)
    if options.json:
        plain = {
            "kvferry_doctor": SCHEMA,
            "broken": is_broken,
            "findings": list(map(asdict, findings)),
        }
        print(visible_json(json.dumps(plain, indent=2, ensure_ascii=False)))
    else:
        print_findings(findings)
    return int(is_broken)


def examine(
    machine: Machine, show: Callable[[str], None] = lambda _: None
) -> Iterator[Finding]:
    """The findings of all checks, which run at the same time, within `machine.timeout_s`.

    A check that fails, or does not end, does not end the others.

    Args:
        show: called with the names of the checks that are waited for.
    """
    end_s = time.monotonic() + machine.timeout_s
    running: dict[str, tuple[threading.Thread, list[Finding]]] = {}
    for name, check in CHECKS.items():
        found: list[Finding] = []
        # A thread each: a call of the system that hangs costs no other check its time. It cannot be ended, and a thread
        # that is no daemon would keep the process.
        thread = threading.Thread(
            target=_run, args=(check, machine, found), daemon=True
        )
        thread.start()
        running[name] = (thread, found)
    # Waited for in turn: the findings have the order of the checks, whichever ends first.
    for name, (thread, found) in running.items():
        while thread.is_alive() and time.monotonic() < end_s:
            alive = [other for other, (one, _) in running.items() if one.is_alive()]
            show(f"kvferry doctor waits for {', '.join(alive)}")
            thread.join(_SHOW_S)
        # A check that has found something is only ending its processes.
        if thread.is_alive() and not found:
            found.append(not_done(f"did not end within {digits(machine.timeout_s)} s"))
        for finding in found:
            yield replace(finding, check=finding.check or name)


def _run(check: Check, machine: Machine, found: list[Finding]) -> None:
    try:
        found.extend(check(machine))
    except Exception as error:  # noqa: BLE001 - reported
        found.append(not_done(f"{type(error).__name__}: {error}"))


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings, each with its remedy in the row below, and the number of each mark."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.mark, finding.check, finding.found))
        # In a row of its own it can be copied.
        if finding.do:
            rows.append(("", "", f"→ {finding.do}"))
    print_table(("", "check", "found, and what to do"), rows, MARKS)
    counts = Counter(finding.mark for finding in findings)
    print_line()
    counted = (f"{counts[mark]} {mark}" for mark in MARKS if counts[mark])
    print_line(", ".join(counted), "bold")
