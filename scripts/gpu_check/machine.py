"""The GPUs of this machine, and who uses how much of their memory, as nvidia-smi says. Standard library only."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STAND_INS = 4
"""Devices that the CPU stands for."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device. `name` is what CUDA_VISIBLE_DEVICES calls it; `driver` and `capability` are empty on a CPU."""

    name: str
    model: str
    total_gib: float
    free_gib: float
    driver: str = ""
    capability: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB in use by device, and the processes that have memory on several devices, with these."""

    used_mib: Mapping[str, int]
    on_several: Mapping[int, tuple[str, ...]]


def find_gpus(device: str, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that this process may use, or on `cpu` what stands for them."""
    if device == "cpu":
        total, free = (_host_kib(name) / (1 << 20) for name in ("MemTotal", "MemAvailable"))
        return tuple(Gpu(str(number), "the CPU", total, free) for number in range(STAND_INS))
    columns = ("index", "name", "memory.total", "memory.free", "driver_version", "compute_cap", "uuid")
    listed = [
        (Gpu(index, model, _mib(total) / 1024, _mib(free) / 1024, driver, capability), uuid)
        for index, model, total, free, driver, capability, uuid in _query("gpu", columns)
    ]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else {name.strip() for name in visible.split(",")}
    return tuple(gpu for gpu, uuid in listed if names is None or {gpu.name, uuid} & names)


def look_at_memory(device: str) -> Memory:
    """Memory in use now; on `cpu` of the host."""
    if device == "cpu":
        return Memory({"host": (_host_kib("MemTotal") - _host_kib("MemAvailable")) // 1024}, {})
    rows = _query("gpu", ("index", "uuid", "memory.used"))
    index_of = {uuid: index for index, uuid, _ in rows}
    on: dict[int, set[str]] = defaultdict(set)
    for uuid, pid in _query("compute-apps", ("gpu_uuid", "pid")):
        on[int(pid)].add(index_of.get(uuid, uuid))
    several = {pid: tuple(sorted(gpus)) for pid, gpus in on.items() if len(gpus) > 1}
    return Memory({index: _mib(used) for index, _, used in rows}, several)


def _mib(text: str) -> int:
    """0 for `[N/A]`, which devices without memory of their own have."""
    return int(text) if text.isdecimal() else 0


def _query(what: str, columns: Sequence[str]) -> list[list[str]]:
    """Rows of nvidia-smi; none where it does not answer."""
    command = ["nvidia-smi", f"--query-{what}={','.join(columns)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(columns)]


def _host_kib(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
