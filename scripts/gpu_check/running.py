"""Runs a part in processes of its own until it ends or its deadline does, and leaves none of them behind."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from scripts.accuracy.processes import Server, tail
from scripts.gpu_check.judging import Mark, Verdict, judge
from scripts.gpu_check.machine import Memory, look_at_memory
from scripts.gpu_check.parts import Planned

_POLL_S = 0.1
_LOOK_S = 2.0
_TERM_S = 5.0
_SUBREAPER = 36
"""prctl's PR_SET_CHILD_SUBREAPER."""


@dataclass(slots=True)
class MemorySeen:
    """Memory that all processes use: before a part, the most while it ran, and after it."""

    before: Mapping[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)
    on_several: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def add(self, now: Memory) -> None:
        """Another look: the last one is the one after."""
        self.before, self.after = self.before or now.used_mib, now.used_mib
        self.most.update({name: max(mib, self.most.get(name, 0)) for name, mib in now.used_mib.items()})
        self.on_several.update(now.on_several)

    def lines(self) -> list[str]:
        """MiB of each device, then the processes that had memory on several."""
        devices = [f"{name}: {mib:,} {self.most[name]:,} {self.after[name]:,}" for name, mib in self.before.items()]
        return devices + [f"process {pid} on GPUs {', '.join(on)}" for pid, on in self.on_several.items()]


@dataclass(frozen=True, slots=True)
class Done:
    """A part, run or skipped.

    Attributes:
        results: the JSON files that it left.
        log: its end, of a part that failed.
    """

    planned: Planned
    verdict: Verdict
    seconds: float = 0.0
    memory: MemorySeen = field(default_factory=MemorySeen)
    results: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind, so that `end_all` finds all of it.

    An engine has a session of its own: it may outlive the part that started it.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_all() -> None:
    """End all descendants of this process: SIGTERM, and SIGKILL for those that are left."""
    running = psutil.Process().children(recursive=True)
    for process in running:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(running, _TERM_S)
    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, _TERM_S)


def run_part(
    planned: Planned,
    device: str,
    folder: Path,
    on_progress: Callable[[float, str], None],
    look: Callable[[str], Memory] = look_at_memory,
) -> Done:
    """Run one part in `folder` and judge it. Whatever it started has ended when this returns or raises.

    Args:
        on_progress: gets the seconds since the start and the last line of the log, all the time.
    """
    part = planned.part
    folder.mkdir(parents=True)
    log = folder / "log"
    process = Server(part.name, ["bash", "-c", part.command], "", log, environment_of(planned, device, folder))
    memory = MemorySeen()
    memory.add(look(device))
    started_s = looked_s = time.monotonic()
    status: int | None = None
    try:
        process.start()
        while (status := process.poll()) is None and time.monotonic() - started_s < 60 * part.minutes:
            if time.monotonic() - looked_s >= _LOOK_S:
                memory.add(look(device))
                looked_s = time.monotonic()
            on_progress(time.monotonic() - started_s, tail(log, 1, 4096).strip())
            time.sleep(_POLL_S)
    finally:
        try:
            process.stop()
        finally:
            end_all()
    memory.add(look(device))
    verdict = judge(part.judge, folder, device, status, tail(log, 1))
    return Done(
        planned,
        verdict,
        time.monotonic() - started_s,
        memory,
        {str(path.relative_to(folder)): _results(path) for path in sorted(folder.glob("**/*.json"))},
        tail(log, 60) if verdict.mark is Mark.FAILED else "",
    )


def _results(path: Path) -> Any:
    with suppress(ValueError):
        return json.loads(path.read_text())
    return path.read_text(errors="replace")[:4096]


def environment_of(planned: Planned, device: str, folder: Path) -> dict[str, str]:
    """The variables that a part has in addition to this process's."""
    added = {"PART": str(folder), "KVFERRY_BENCH_RESULTS": str(folder)}
    if device == "cuda":
        added |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(planned.gpus)}
    return added | {name: value.replace("$PART", str(folder)) for name, value in planned.part.environment.items()}
