"""Judges of the parts: from the files that a part left in its folder to a verdict.

A judge raises OSError, ValueError, LookupError or TypeError where it does not find what it expects.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


class Mark(enum.Enum):
    """The result of a part. Only `FAILED` makes the exit status 1."""

    OK = "ok"
    LOOK = "look"
    FAILED = "FAILED"
    SKIPPED = "skipped"


_BROKEN = re.compile(r" ended early: | [0-9]+ of [0-9]+ failed: ")
"""In notes of `bench.serve`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`found`: what was seen, in a line."""

    mark: Mark
    found: str


def doctor(folder: Path, device: str) -> Verdict:
    """Nothing may be broken."""
    findings = _json(folder / "doctor.json")["findings"]
    counts = {mark: sum(one["mark"] == mark for one in findings) for mark in ("ok", "look", "not done", "broken")}
    found = ", ".join(f"{count} {mark}" for mark, count in counts.items() if count)
    broken = "".join(f"; {one['check']}: {one['found']}" for one in findings if one["mark"] == "broken")
    return Verdict(Mark.FAILED if broken else Mark.OK, found + broken)


def tests(folder: Path, device: str) -> Verdict:
    """Pytest's JUnit file: nothing failed, and something passed."""
    cases = list(ElementTree.parse(folder / "tests.xml").getroot().iter("testcase"))  # noqa: S314 (from pytest)
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    named = "".join(f"; {case.get('name')}" for case in failed[:3])
    good = passed > 0 and not failed
    found = f"{passed} passed, {len(failed)} failed, {skipped} skipped{named}"
    return Verdict(Mark.OK if good else Mark.FAILED, found)


def benchmark(folder: Path, device: str) -> Verdict:
    """A result of `bench`. A missed target is no fault, but to be looked at. They are promised for GPUs.

    Of several setups one may fail: it is a fault if it is kvferry's.
    """
    (path,) = folder.glob("**/*.json")
    result = _json(path)
    if broken := [note for note in result["notes"] if _BROKEN.search(note)]:
        ours = any(note.startswith("kvferry") for note in broken)
        return Verdict(Mark.FAILED if ours else Mark.LOOK, "; ".join(broken)[:1000])
    targets = result["targets"] if device == "cuda" else []
    missed = [one for one in targets if not one["met"]]
    shown = [f"{one['name']} {one['measured']} {one['unit']} ({one['kind']} {one['limit']})" for one in missed]
    if targets:
        found = "; ".join([f"{len(targets) - len(missed)} of {len(targets)} targets are met", *shown[:3]])
        return Verdict(Mark.LOOK if missed else Mark.OK, found)
    columns, row = result["tables"][0]["columns"], result["tables"][0]["rows"][0]
    last = [f"{column} {value}" for column, value in zip(columns[-3:], row[-3:], strict=True)]
    return Verdict(Mark.OK, f"{row[0]}: {'; '.join(last)}")


def reads(folder: Path, device: str) -> Verdict:
    """Every byte is right, and GPU memory is read over cuda_ipc."""
    result = _json(folder / "reads.json")
    lanes = result["transports"] or "transports that UCX does not name"
    found = f"{max(one['gb_s'] for one in result['reads']):.3g} GB/s at most, over {lanes}"
    if not result["right"]:
        return Verdict(Mark.FAILED, f"wrong bytes arrived: {found}")
    if device == "cuda" and "cuda_ipc" not in lanes:
        return Verdict(Mark.LOOK, f"not over cuda_ipc: {found}")
    return Verdict(Mark.OK, found)


def accuracy(folder: Path, device: str) -> Verdict:
    """The report of the accuracy test has passed."""
    (path,) = folder.glob("*/report.json")
    (report,) = _json(path)
    failed = [f"{one['name']}: {one['detail']}" for one in report["checks"] if one["passed"] is False]
    if report["passed"]:
        return Verdict(Mark.OK, f"{len(report['checks'])} checks; {report['checks'][0]['detail']}")
    return Verdict(Mark.FAILED, "; ".join(failed[:3]))


def backends(folder: Path, device: str) -> Verdict:
    """Of every backend that vLLM itself starts, kvferry finds where K and V of each token, or the latents, are.

    One that only kvferry stops is a fault; one whose blocks it moves whole is to be looked at.
    """
    rows = _json(folder / "backends.json")
    started = [row for row in rows if not row["stopped_by"]]
    stopped = [row for row in rows if row["stopped_by"] == "kvferry"]
    whole = [row for row in started if not set(row["kinds"]) <= {"k", "v", "mla"}]
    named = "".join(f"; {row['backend']} {row['cache']}: {row['found']}" for row in [*stopped, *whole][:3])
    found = f"{len(started) - len(whole)} recognised, {len(whole)} moved whole, {len(stopped)} stopped by kvferry"
    found += f", {len(rows) - len(started) - len(stopped)} not started by vLLM{named}"
    if stopped or not started:
        return Verdict(Mark.FAILED, found)
    return Verdict(Mark.LOOK if whole else Mark.OK, found)


Judge = Callable[[Path, str], Verdict]
"""Of a part's folder, on the device `cuda` or `cpu`."""


def judge(by: Judge, folder: Path, device: str, status: int | None, last_line: str) -> Verdict:
    """The verdict of a part.

    Args:
        status: its exit status; None if its deadline ended it.
    """
    if status is None:
        return Verdict(Mark.FAILED, f"did not end by its deadline; last line: {last_line}")
    try:
        verdict = by(folder, device)
    except (OSError, ValueError, LookupError, TypeError, ElementTree.ParseError):
        return Verdict(Mark.FAILED, f"exit status {status} without a result; last line: {last_line}")
    if status and verdict.mark is not Mark.FAILED:
        return Verdict(Mark.FAILED, f"exit status {status}: {last_line}")
    return verdict


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
