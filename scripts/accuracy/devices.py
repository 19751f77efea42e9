"""GPUs, cores and ports: counted, and handed out to engines. Standard library only."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

# Below the range from which kernels commonly take ports for outgoing connections: an engine needs a minute to start,
# and a port of that range could be gone by then.
_LOWEST, _HIGHEST = 12000, 32000


def visible_gpus(
    environment: Mapping[str, str], listed: int | None = None
) -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, else their indices.

    As CUDA does, the first index that the driver does not list ends the list. A GPU may be named twice: then two
    engines have it before any other is used.

    Args:
        listed: how many GPUs the driver lists; None to ask it.
    """
    known = _listed_gpus() if listed is None else listed
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(map(str, range(known)))
    names: list[str] = []
    for name in map(str.strip, visible.split(",")):
        is_unknown_index = name.isdecimal() and int(name) >= known
        if not known or not name or name.startswith("-") or is_unknown_index:
            break
        names.append(name)
    return tuple(names)


def _listed_gpus() -> int:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # The lines of MIG devices are indented.
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def hand_out_gpus(needs: Sequence[int], gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """The GPUs of each engine, in turn. Where there are fewer than workers, engines share them.

    The workers of one engine never do: NCCL refuses two ranks on one GPU.

    Raises:
        ValueError: an engine has more workers than there are GPUs.
    """
    if max(needs) > len(set(gpus)):
        raise ValueError(
            f"an engine has {max(needs)} workers, and there are {len(set(gpus))} GPUs"
        )
    names = cycle(gpus)
    shares: list[tuple[str, ...]] = []
    for need in needs:
        share: list[str] = []
        while len(share) < need:
            name = next(names)
            if name not in share:
                share.append(name)
        shares.append(tuple(share))
    return shares


def hand_out_cores(
    needs: Sequence[int], cores: Sequence[int] | None = None
) -> list[tuple[str, ...]]:
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
    # One after the other: a sample of all that may be needed takes longer than the test that asks for one port.
    chooser = random.Random()
    found: set[int] = set()
    for _ in range(count + 2000):
        if len(found) == count:
            break
        port = chooser.randrange(_LOWEST, _HIGHEST)
        if port not in found and _is_free(port):
            found.add(port)
    if len(found) < count:
        raise OSError(
            f"only {len(found)} free ports were found from {_LOWEST} to {_HIGHEST}; {count} are needed"
        )
    return list(found)


def free_port_range(count: int) -> int:
    """The first of so many consecutive ports on which no process listens now: each data parallel rank of an engine
    takes the next one for its side channel. Raises like `free_ports`."""
    starts = range(_LOWEST, _HIGHEST - count + 1)
    for first in random.Random().sample(starts, min(2000, len(starts))):
        if all(map(_is_free, range(first, first + count))):
            return first
    raise OSError(
        f"no {count} consecutive free ports were found from {_LOWEST} to {_HIGHEST}"
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
