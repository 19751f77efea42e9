"""`kvferry doctor`: runs the checks and prints the findings."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvferry.cli.arguments import number_option, whole_option
from kvferry.cli.doctor.channel import check_address, check_secret, check_telemetry
from kvferry.cli.doctor.devices import Machine, check_devices, check_efa, this_machine
from kvferry.cli.doctor.findings import Finding, Mark, not_done
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
from kvferry.cli.formatting import digits, print_line, print_table, terminal
from kvferry.protocol.visible import visible_json

if TYPE_CHECKING:
    from kvferry.cli.transfer.messages import Device

SCHEMA = 1
_SHOW_S = 0.2
_COLOURS = {"ok": "green", "look": "yellow", "broken": "bold red", "not done": "dim"}


def _check_loopback(device: Device, machine: Machine) -> Iterable[Finding]:
    # Imported by the check alone: it needs msgspec, which may be missing, and the doctor must be able to say so.
    from kvferry.cli.doctor.loopback import check_loopback

    return check_loopback(machine, device)


# All checks in the order of their findings.
CHECKS: dict[str, Callable[[Machine], Iterable[Finding]]] = {
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


class _Running(threading.Thread):
    """A check on a thread of its own: a call of the system that hangs costs no other check its time."""

    def __init__(self, check: Callable[[], Iterable[Finding]]) -> None:
        # A call of a driver cannot be ended, and a thread that is no daemon would keep the process.
        super().__init__(daemon=True)
        self._check = check
        self.findings: list[Finding] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.findings.extend(self._check())
        except BaseException as error:  # noqa: BLE001 - reported where the check is waited for
            self.error = error


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code: 1 if anything is broken.

    Raises:
        InvalidArgument: an option is invalid.
    """
    ranks = whole_option("--data-parallel-size", options.data_parallel_size, 1, 1024)
    timeout_s = number_option("--timeout", options.timeout, 0.1, 600)
    machine = this_machine(os.environ, ranks, timeout_s)
    with _progress() as show:
        findings = list(examine(machine, show))
    if options.json:
        print(visible_json(json.dumps(as_json(findings), indent=2, ensure_ascii=False)))
    else:
        print_findings(findings)
    is_broken = any(finding.mark is Mark.BROKEN for finding in findings)
    return 1 if is_broken else 0


def examine(
    machine: Machine, show: Callable[[str], None] = lambda _: None
) -> Iterator[Finding]:
    """The findings of all checks, which run at the same time, within `machine.timeout_s`.

    A check that fails, or does not end, does not end the others.

    Args:
        show: called with the names of the checks that are waited for.
    """
    end_s = time.monotonic() + machine.timeout_s
    threads = {
        name: _Running(functools.partial(check, machine))
        for name, check in CHECKS.items()
    }
    for thread in threads.values():
        thread.start()
    # Waited for in turn: the findings have the order of the checks, whichever ends first.
    for name, thread in threads.items():
        while thread.is_alive() and time.monotonic() < end_s:
            show(", ".join(other for other in threads if threads[other].is_alive()))
            thread.join(_SHOW_S)
        # Read before the findings: those of a thread that ends in between are complete then.
        is_alive = thread.is_alive()
        findings = list(thread.findings)
        # A check that has found something is only ending its processes.
        if is_alive and all(finding.check for finding in findings):
            findings.append(
                not_done(f"did not end within {digits(machine.timeout_s)} s")
            )
        elif isinstance(thread.error, Exception):
            findings.append(not_done(f"{type(thread.error).__name__}: {thread.error}"))
        elif thread.error is not None:
            raise thread.error
        for finding in findings:
            yield replace(finding, check=finding.check or name)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line with the checks that are waited for, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    started_s = time.monotonic()
    with terminal(errors=True).status("kvferry doctor") as status:

        def show(names: str) -> None:
            status.update(f"{time.monotonic() - started_s:.0f} s, waiting for {names}")

        yield show


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The whole answer as plain values."""
    plain = []
    for finding in findings:
        named = {"check": finding.check, **asdict(finding), "mark": finding.mark.value}
        plain.append(named)
    is_broken = any(finding.mark is Mark.BROKEN for finding in findings)
    return {"kvferry_doctor": SCHEMA, "broken": is_broken, "findings": plain}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings, each with its remedy in the row below, and the number of each mark."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.mark.value, finding.check, finding.found))
        # In a row of its own it can be copied.
        if finding.do:
            rows.append(("", "", f"→ {finding.do}"))
    print_table(("", "check", "found, and what to do"), rows, _COLOURS)
    counts = Counter(finding.mark for finding in findings)
    print_line()
    print_line(
        ", ".join(f"{counts[mark]} {mark.value}" for mark in Mark if counts[mark]),
        "bold",
    )
