"""GPUs, cores and ports: counted, and handed out to engines. Standard library only."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Mapping, Sequence
from itertools import islice

# Below the range from which kernels commonly take ports for outgoing connections: an engine needs a minute to start,
# and a port of that range could be gone by then.
_LOWEST, _HIGHEST = 12000, 32000


def count_gpus(environment: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs that this process may use: CUDA_VISIBLE_DEVICES if it is set, else the driver's list.

    One that is named twice counts twice: two engines may share it.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    listed = _listed_gpus()
    if visible is None:
        return listed
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return len(names) if len(set(names)) <= listed else listed


def _listed_gpus() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # The lines of MIG devices are indented.
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def hand_out_gpus(needs: Sequence[int], environment: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Consecutive GPUs for each engine: indices, or the names in CUDA_VISIBLE_DEVICES. `read_settings` has
    checked that there are enough."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").strip()
    names = iter(visible.split(",") if visible else map(str, range(sum(needs))))
    return [tuple(islice(names, need)) for need in needs]


def hand_out_cores(needs: Sequence[int], cores: Sequence[int] | None = None) -> list[tuple[str, ...]]:
    """Cores for each engine, one per worker; shared round-robin when there are fewer cores than workers."""
    usable = sorted(os.sched_getaffinity(0)) if cores is None else cores
    names = iter([str(usable[number % len(usable)]) for number in range(sum(needs))])
    return [tuple(islice(names, need)) for need in needs]


def free_ports(count: int) -> list[int]:
    """Different ports on which no process listens now.

    Another process may still take one before it is used: then the engine says so in its log and the run ends.

    Raises:
        OSError: hardly any port is free.
    """
    candidates = random.Random().sample(range(_LOWEST, _HIGHEST), min(count + 2000, _HIGHEST - _LOWEST))
    found = list(islice(filter(_is_free, candidates), count))
    if len(found) < count:
        raise OSError(f"only {len(found)} free ports were found from {_LOWEST} to {_HIGHEST}; {count} are needed")
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
