"""Runs a part until it ends or its deadline does, leaves no process behind, and judges it."""

from __future__ import annotations

import ctypes
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from scripts.accuracy.processes import Server, tail
from scripts.accuracy.settings import VARIABLES
from scripts.gpu_check.gpus import MemorySeen
from scripts.gpu_check.parts import Part, Planned

_POLL_S = 0.1
_LOOK_S = 2.0
_TERM_S = 5.0
_SUBREAPER = 36
"""prctl's PR_SET_CHILD_SUBREAPER."""


@dataclass(frozen=True, slots=True)
class Done:
    """A part, run or skipped.

    Attributes:
        mark: `ok`, `look`, `FAILED` or `skipped`; only `FAILED` makes the exit status 1.
        found: the lines of the log that the mark is for, or the last one.
        memory: lines of `MemorySeen`.
        results: the JSON files that it left.
        log: its end.
    """

    name: str
    mark: str
    found: str
    seconds: float = 0.0
    gpus: tuple[str, ...] = ()
    command: str = ""
    memory: Sequence[str] = ()
    results: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""


def judge(part: Part, status: int | None, log: str) -> tuple[str, str]:
    """The mark of a part and what was found.

    Args:
        status: its exit status; None if its deadline ended it.
    """
    last = log.rstrip().rpartition("\n")[2].strip()
    if status is None:
        return "FAILED", f"did not end by its deadline; last line: {last}"
    if status:
        return "FAILED", f"exit status {status}: {last}"
    for mark, pattern in (("FAILED", part.fails), ("look", part.look)):
        if pattern and (lines := re.findall(pattern, log, re.MULTILINE)):
            return mark, "; ".join(" ".join(line.split()) for line in lines[:3])
    return "ok", last


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind, so that `end_all` finds all of it.

    An engine has a session of its own: it may outlive the part that started it.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_all() -> None:
    """End all descendants of this process: SIGTERM, and SIGKILL for those that are left."""
    for end in (psutil.Process.terminate, psutil.Process.kill):
        running = psutil.Process().children(recursive=True)
        for process in running:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(running, _TERM_S)


def run_part(
    planned: Planned,
    device: str,
    folder: Path,
    on_progress: Callable[[float, str], None],
    limit_s: float = math.inf,
) -> Done:
    """Run one part in `folder` and judge it. Whatever it started has ended when this returns or raises.

    Args:
        on_progress: gets the seconds since the start and the last line of the log, all the time.
        limit_s: its deadline, if that is earlier than the part's own.
    """
    part = planned.part
    log = folder / "log"
    process = Server(
        part.name,
        ["bash", "-c", part.command],
        "",
        log,
        environment_of(planned, device, folder),
    )
    memory = MemorySeen()
    memory.look(device)
    started_s = looked_s = time.monotonic()
    deadline_s = started_s + min(60 * part.minutes, limit_s)
    status: int | None = None
    try:
        process.start()
        while (status := process.poll()) is None and time.monotonic() < deadline_s:
            if time.monotonic() - looked_s >= _LOOK_S:
                memory.look(device)
                looked_s = time.monotonic()
            on_progress(time.monotonic() - started_s, tail(log, 1, 4096).strip())
            time.sleep(_POLL_S)
    finally:
        try:
            process.stop()
        finally:
            end_all()
    memory.look(device)
    mark, found = judge(part, status, tail(log, 10_000))
    results = {
        str(path.relative_to(folder)): _read(path)
        for path in sorted(folder.rglob("*.json"))
    }
    seconds = round(time.monotonic() - started_s, 1)
    return Done(
        part.name,
        mark,
        found,
        seconds,
        planned.gpus,
        part.command,
        memory.lines(),
        results,
        tail(log, 60),
    )


def _read(path: Path) -> Any:
    """A JSON file; the error of one that a part's deadline has cut off."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return repr(error)


def environment_of(planned: Planned, device: str, folder: Path) -> dict[str, str]:
    """The variables that a part has in addition to this process's. An empty one has its default: what the user has set
    for the accuracy test is for no part, and colours would hide lines that are looked for."""
    added = {
        variable.name: "" for name, variable in VARIABLES.items() if name != "cache_dir"
    }
    added |= {"NO_COLOR": "1", "FORCE_COLOR": "", "KVFERRY_DEVICE": device}
    added |= dict.fromkeys(("PART", "LOG_DIR", "KVFERRY_BENCH_RESULTS"), str(folder))
    if device == "cuda":
        added |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(planned.gpus),
        }
    return added
