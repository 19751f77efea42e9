"""GPUs, counted and handed out; on CPU the same for cores. Standard library only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def count_gpus(environment: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs that this process may use: CUDA_VISIBLE_DEVICES if it is set, else the driver's list."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    listed = _listed_gpus()
    if visible is None:
        return listed
    named = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return min(len(named), listed)


def _listed_gpus() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        driver = Path("/proc/driver/nvidia/gpus")
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    return parse_gpu_list(done.stdout) if done.returncode == 0 else 0


def parse_gpu_list(output: str) -> int:
    """Count the GPUs that `nvidia-smi --list-gpus` names; the lines of MIG devices, indented, are not counted.

    Example: `"GPU 0: H100 (UUID: GPU-…)\\n  MIG 1g.10gb Device 0: (UUID: MIG-…)\\n"` is 1.
    """
    return sum(line.startswith("GPU ") for line in output.splitlines())


@dataclass(frozen=True, slots=True)
class Share:
    """The devices of one engine: GPU indices (or the names in CUDA_VISIBLE_DEVICES), or cores."""

    ids: tuple[str, ...]


def hand_out_gpus(needs: list[int], environment: Mapping[str, str]) -> list[Share]:
    """Consecutive GPUs for each engine, none shared. `read_settings` has checked that there are enough."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").strip()
    names = visible.split(",") if visible else [str(index) for index in range(sum(needs))]
    return _consecutive(needs, names, wrap=False)


def hand_out_cores(needs: list[int], cores: list[int] | None = None) -> list[Share]:
    """Cores for each engine, one per worker; shared round-robin when there are fewer cores than workers."""
    usable = sorted(os.sched_getaffinity(0)) if cores is None else cores
    return _consecutive(needs, [str(core) for core in usable], wrap=True)


def _consecutive(needs: list[int], names: list[str], *, wrap: bool) -> list[Share]:
    shares = []
    position = 0
    for need in needs:
        chosen = [names[index % len(names)] if wrap else names[index] for index in range(position, position + need)]
        shares.append(Share(tuple(chosen)))
        position += need
    return shares
