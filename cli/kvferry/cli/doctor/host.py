"""Checks of the kernel's settings: limits, shared memory, processors, huge pages."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, broken, look, ok
from kvferry.cli.formatting import binary_bytes

FILES_OF_A_WORKER = 256
"""Upper estimate of the open files of a vLLM worker without peers."""
FILES_PER_PEER = 2
"""A connection of UCX over TCP, and one of the side channel."""
MANY_PEERS = 64
FEW_PEERS = 4
SHM = "dev/shm"
SHM_WANTED = 1 << 30
SHM_NEEDED = 96 << 20
"""Docker's default is 64 MiB, in which the queues of a vLLM engine with several workers do not fit."""
THP_VARIABLE = "THP_MEM_ALLOC_ENABLE"
_CAP_IPC_LOCK = 14


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """RDMA registers memory by locking it."""
    check = "locked memory"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield ok(check, "no limit")
    elif _has(machine, _CAP_IPC_LOCK):
        yield ok(check, f"limit {binary_bytes(limit)}, lifted by CAP_IPC_LOCK")
    elif not machine.ports:
        yield ok(
            check, f"limit {binary_bytes(limit)}; nothing here locks memory without an RDMA device"
        )
    else:
        do = "ulimit -l unlimited; Docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
        yield broken(
            check,
            f"limit {binary_bytes(limit)}: a cache cannot be registered with an RDMA device",
            do,
        )


def check_files(machine: Machine) -> Iterator[Finding]:
    """The number of peer workers that the limit of open files allows."""
    check = "open files"
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        yield ok(check, "no limit")
        return
    peers = max(0, limit - FILES_OF_A_WORKER) // FILES_PER_PEER
    found = f"limit {limit}: room for {peers} peer workers, at {FILES_PER_PEER} files each"
    raised = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    how = f"ulimit -n {raised}" if raised > limit else "raise the hard limit as root"
    do = f"{how}; Docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536"
    if peers >= MANY_PEERS:
        yield ok(check, found)
    else:
        yield broken(check, found, do) if peers < FEW_PEERS else look(check, found, do)


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """The size of `/dev/shm`, for the engine's queues, and for UCX on one host."""
    check, do = (
        "shared memory",
        "Docker: --shm-size=8g; Kubernetes: an emptyDir with medium Memory mounted there",
    )
    if not (machine.root / SHM).is_dir():
        yield broken(check, f"/{SHM} is not there", do)
        return
    size = os.statvfs(machine.root / SHM)
    free_bytes = size.f_bavail * size.f_frsize
    found = f"/{SHM} has {binary_bytes(free_bytes)} of {binary_bytes(size.f_blocks * size.f_frsize)} free"
    do = f"{do}; or remove files of dead engines from it"
    if free_bytes < SHM_NEEDED:
        yield broken(check, f"{found}: too little for an engine's queues and UCX", do)
    else:
        yield look(check, found, do) if free_bytes < SHM_WANTED else ok(check, found)


def check_processors(machine: Machine) -> Iterator[Finding]:
    """With a quota below the number of running threads, all of them, the transfer thread too, stop for part of every
    100 ms."""
    check, gpus = "processors", len(machine.gpus)
    cores = len(os.sched_getaffinity(0))
    omp = machine.environ.get("OMP_NUM_THREADS", "")
    threads = int(omp) if omp.isdecimal() and int(omp) else cores
    quota = min(_quotas(machine), default=None)
    if quota is None:
        yield ok(check, f"{cores} cores, no quota")
        return
    found = f"{cores} cores, a quota of {quota:g}"
    if quota < 1 + gpus:
        do = "a core per worker and one for the engine: Kubernetes: resources.limits.cpu; Docker: --cpus"
        yield look(check, f"{found} for {gpus} GPU workers and their engine" if gpus else found, do)
    elif quota < threads:
        do = f"export OMP_NUM_THREADS={math.floor(quota)}, or raise the quota"
        yield look(
            check, f"{found}, and {threads} threads compute: all stop when it is used up", do
        )
    else:
        yield ok(check, found)


def _quotas(machine: Machine) -> Iterator[float]:
    """CPU quotas, in cores, of this process's cgroup and its parents, of either cgroup version."""
    mounts = Path("sys/fs/cgroup")
    for line in machine.text("proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        mount = mounts if number == "0" else mounts / controllers
        folder = mount / path.lstrip("/")
        for one in (folder, *folder.parents):
            if one == mount or mount in one.parents:
                written = machine.text(f"{one}/cpu.max").split()
                quota, period = written or (
                    machine.text(f"{one}/cpu.cfs_{name}_us") for name in ("quota", "period")
                )
                if quota.isdecimal():  # otherwise `max`, or -1
                    yield int(quota) / int(period)


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Huge pages speed up caches in host memory (large reads: 17.5 instead of 10.3 GB/s), not in GPU memory.

    The kernel writes the chosen mode in brackets: `always [madvise] never`.
    """
    check = "huge pages"
    mode = (
        machine.text("sys/kernel/mm/transparent_hugepage/enabled")
        .partition("[")[2]
        .partition("]")[0]
    )
    found = f"transparent: {mode}" if mode else "the kernel has no transparent ones"
    if not mode or machine.gpus:
        yield ok(check, found)
    elif mode == "never":
        do = f"echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; export {THP_VARIABLE}=1"
        yield look(
            check, f"{found}: reads of caches in host memory are slower than they could be", do
        )
    elif machine.environ.get(THP_VARIABLE) != "1":
        do = f"export {THP_VARIABLE}=1: torch puts large CPU tensors on huge pages; large reads were 1.7 times as fast"
        yield look(
            check,
            f"{found}, and {THP_VARIABLE} is not set: caches in host memory are in small pages",
            do,
        )
    else:
        yield ok(check, f"{found}, {THP_VARIABLE}=1")


def _has(machine: Machine, capability: int) -> bool:
    lines = machine.text("proc/self/status").splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> capability & 1)
