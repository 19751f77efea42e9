"""The GPUs of this machine, and who uses how much of their memory, as nvidia-smi says. Standard library only."""

from __future__ import annotations

import math
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

_STAND_INS = 4
"""Devices that the CPU stands for."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device, by the name that CUDA_VISIBLE_DEVICES has for it. `about`: its model, memory, capability and driver."""

    name: str
    about: str
    free_gib: float


def find_gpus(device: str, environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that this process may use, or on `cpu` what stands for them."""
    if device == "cpu":
        return [Gpu(str(number), "the CPU", math.inf) for number in range(_STAND_INS)]
    listed = [
        (
            uuid,
            Gpu(
                index,
                f"{model}, {total} MiB, {capability}, driver {driver}",
                _mib(free) / 1024,
            ),
        )
        for index, uuid, free, model, total, capability, driver in _query(
            "gpu", "index,uuid,memory.free,name,memory.total,compute_cap,driver_version"
        )
    ]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else {name.strip() for name in visible.split(",")}
    return [gpu for uuid, gpu in listed if names is None or {gpu.name, uuid} & names]


@dataclass(slots=True)
class MemorySeen:
    """MiB that all processes use on each GPU: at the first look, the most, and at the last one; nothing on a CPU."""

    first: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    on_several: dict[str, set[str]] = field(default_factory=dict)

    def look(self, device: str) -> None:
        """Ask nvidia-smi once more."""
        if device == "cpu":
            return
        rows = _query("gpu", "index,uuid,memory.used")
        if not rows:
            return  # it does not answer now
        self.last = {index: _mib(used) for index, _, used in rows}
        self.first = self.first or self.last
        self.most = {
            index: max(mib, self.most.get(index, 0)) for index, mib in self.last.items()
        }
        index_of = {uuid: index for index, uuid, _ in rows}
        on = defaultdict(set)
        for uuid, pid in _query("compute-apps", "gpu_uuid,pid"):
            on[pid].add(index_of.get(uuid, uuid))
        self.on_several |= {pid: gpus for pid, gpus in on.items() if len(gpus) > 1}

    def lines(self) -> list[str]:
        """MiB of each device, then the processes that had memory on several."""
        devices = [
            f"{name}: {mib:,} {self.most[name]:,} {self.last[name]:,}"
            for name, mib in self.first.items()
        ]
        return devices + [
            f"process {pid} on GPUs {', '.join(sorted(gpus))}"
            for pid, gpus in self.on_several.items()
        ]


def _mib(text: str) -> int:
    """0 for `[N/A]`, which devices without memory of their own have."""
    return int(text) if text.isdecimal() else 0


def _query(what: str, columns: str) -> list[list[str]]:
    """Rows of nvidia-smi; none where it does not answer."""
    command = [
        "nvidia-smi",
        f"--query-{what}={columns}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        [cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()
    ]
    return [row for row in rows if len(row) == columns.count(",") + 1]
