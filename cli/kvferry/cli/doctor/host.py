"""Checks of the kernel's settings: limits, shared memory, processors, huge pages."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from kvferry.cli.doctor.devices import Machine, error_of
from kvferry.cli.doctor.findings import Finding, broken, look, ok
from kvferry.cli.formatting import binary_bytes

# Upper estimate of the open files of a vLLM worker without peers; a peer has a connection of UCX over TCP, and one of
# the side channel.
FILES_OF_A_WORKER = 256
FILES_PER_PEER = 2
# A fleet of the first size is common; below the second not even a small one works.
MANY_PEERS = 64
FEW_PEERS = 4
SHM = "dev/shm"
SHM_WANTED = 1 << 30
# Docker's default is 64 MiB, in which the queues of a vLLM engine with several workers do not fit.
SHM_NEEDED = 96 << 20
THP_VARIABLE = "THP_MEM_ALLOC_ENABLE"
FIRST_PID_NAMESPACE = "pid:[4026531836]"
FIRST_IPC_NAMESPACE = "ipc:[4026531839]"
"""Those of the host itself: their numbers are constants of the kernel."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Docker's --cap-add IPC_LOCK lifts the limit without changing it.
_CAP_IPC_LOCK = 14
_MAP = """
import mmap, os, sys
pid, fd, content = int(sys.argv[1]), sys.argv[2], sys.argv[3].encode()
os.close(os.pidfd_open(pid))
with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
    found = mmap.mmap(file.fileno(), len(content), prot=mmap.PROT_READ)[:]
if found != content:
    raise ValueError(f"it has {found} in place of {content}")
"""


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """RDMA registers memory by locking it."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = f"limit {binary_bytes(limit_bytes)}"
    if limit_bytes == resource.RLIM_INFINITY:
        yield ok("no limit")
    elif _has_capability(machine, _CAP_IPC_LOCK):
        yield ok(f"{limit}, lifted by CAP_IPC_LOCK")
    elif not machine.ports:
        yield ok(f"{limit}; nothing here locks memory without an RDMA device")
    else:
        yield broken(
            f"{limit}: a cache cannot be registered with an RDMA device",
            "ulimit -l unlimited; Docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity",
        )


def check_files(machine: Machine) -> Iterator[Finding]:
    """The number of peer workers that the limit of open files allows."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        yield ok("no limit")
        return
    peers = max(0, limit - FILES_OF_A_WORKER) // FILES_PER_PEER
    found = (
        f"limit {limit}: room for {peers} peer workers, at {FILES_PER_PEER} files each"
    )
    raised = 65536
    if hard != resource.RLIM_INFINITY:
        raised = min(raised, hard)
    how = "raise the hard limit as root"
    if raised > limit:
        how = f"ulimit -n {raised}"
    do = f"{how}; Docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536"
    yield _graded(peers, FEW_PEERS, MANY_PEERS, found, do)


def _graded(amount: int, needed: int, wanted: int, found: str, do: str) -> Finding:
    """Broken below what is needed, and fine from what is wanted on."""
    if amount >= wanted:
        return ok(found)
    if amount >= needed:
        return look(found, do)
    return broken(found, do)


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """The size of `/dev/shm`, for the engine's queues, and for UCX on one host."""
    do = "Docker: --shm-size=8g; Kubernetes: an emptyDir with medium Memory mounted there"
    if not (machine.root / SHM).is_dir():
        yield broken(f"/{SHM} is not there", do)
        return
    size = os.statvfs(machine.root / SHM)
    free_bytes = size.f_bavail * size.f_frsize
    all_bytes = size.f_blocks * size.f_frsize
    found = f"/{SHM} has {binary_bytes(free_bytes)} of {binary_bytes(all_bytes)} free"
    do = f"{do}; or remove files of dead engines from it"
    if free_bytes < SHM_NEEDED:
        found = f"{found}: too little for an engine's queues and UCX"
    yield _graded(free_bytes, SHM_NEEDED, SHM_WANTED, found, do)


def check_mapped_reads(machine: Machine) -> Iterator[Finding]:
    """Whether processes of this host can map each other's caches."""
    if machine.gpus:
        yield _mapped_reads_of_gpus(machine)
    architecture = platform.machine()
    if architecture != "x86_64":
        yield ok(f"not on {architecture}, which may reorder loads: reads go over NIXL")
        return
    error = _error_of_mapping(machine)
    if error:
        found = (
            f"memory of another process cannot be mapped ({error}): reads go over NIXL"
        )
        do = "run both engines as one user, without hidepid, and let seccomp allow memfd_create and pidfd_open"
        yield look(found, do)
        return
    namespace = _namespace(machine, "pid")
    if namespace != FIRST_PID_NAMESPACE:
        found = f"only within this container, which has a PID namespace of its own, {namespace}"
        yield look(
            found, "start the containers of both engines with --pid=host, or hostPID"
        )
        return
    yield ok(
        "processes of one user can map each other's; vLLM's own caches are not in shared files"
    )


def _mapped_reads_of_gpus(machine: Machine) -> Finding:
    """Why caches on a GPU are not mapped, and what would be in the way if an operator turned that on."""
    found = "caches on a GPU are not mapped: CUDA IPC is off by default until it has been tried on one"
    lacks: list[str] = []
    if not any(importlib.metadata.distributions(name="cuda-bindings")):
        lacks.append("the Python package cuda-bindings")
    for variable in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in machine.environ.get(variable, "").lower():
            lacks.append(f"memory that can be exported ({variable})")
    if _namespace(machine, "ipc") != FIRST_IPC_NAMESPACE:
        lacks.append("the host's IPC namespace (Docker: --ipc=host; or hostIPC)")
    if any(" MIG " in gpu for gpu in machine.gpus):
        lacks.append("a GPU that is not divided (MIG)")
    if lacks:
        return ok(f"{found}; mapped_reads: cuda_ipc would lack {', '.join(lacks)}")
    return ok(f"{found} (mapped_reads: cuda_ipc)")


def _namespace(machine: Machine, kind: str) -> str:
    return os.readlink(machine.root / f"proc/self/ns/{kind}")


def _error_of_mapping(machine: Machine) -> str:
    """Let another process do with this one what a consumer does: map a file of it, and read it."""
    content = "kvferry"
    try:
        fd = os.memfd_create("kvferry-doctor")
    except OSError as refused:
        return f"no memory file can be made: {refused}"
    with open(fd, "wb", buffering=0) as file:
        file.write(content.encode())
        arguments = (str(os.getpid()), str(fd), content)
        return error_of(_MAP, *arguments, environ=machine.environ)


def check_processors(machine: Machine) -> Iterator[Finding]:
    """Cores and quota."""
    # With a quota below the number of running threads all of them, the transfer thread too, stop for part of every
    # 100 ms.
    cores = len(os.sched_getaffinity(0))
    quota = min(_quotas(machine), default=None)
    if quota is None:
        yield ok(f"{cores} cores, no quota")
        return
    threads = cores
    omp = machine.environ.get("OMP_NUM_THREADS", "")
    if omp.isdecimal() and int(omp):
        threads = int(omp)
    gpus = len(machine.gpus)
    found = f"{cores} cores, a quota of {quota:g}"
    if quota < 1 + gpus:
        if gpus:
            found = f"{found} for {gpus} GPU workers and their engine"
        do = "a core per worker and one for the engine: Kubernetes: resources.limits.cpu; Docker: --cpus"
        yield look(found, do)
    elif quota < threads:
        found = f"{found}, and {threads} threads compute: all stop when the quota is used up"
        yield look(
            found, f"export OMP_NUM_THREADS={math.floor(quota)}, or raise the quota"
        )
    else:
        yield ok(found)


def _quotas(machine: Machine) -> Iterator[float]:
    """CPU quotas, in cores, of this process's cgroup and its parents, of either cgroup version."""
    for line in machine.text("proc/self/cgroup").splitlines():
        # In version 1 the controllers have mounts of their own; version 2 names none.
        _, controllers, path = line.split(":", 2)
        own_group = Path("sys/fs/cgroup", controllers, path.lstrip("/"))
        for group in (own_group, *own_group.parents):
            yield from _quota(machine, group)


def _quota(machine: Machine, group: Path) -> Iterator[float]:
    """The quota of one cgroup, in cores, if it has one."""
    quota, _, period = machine.text(f"{group}/cpu.max").partition(" ")
    if not quota:
        quota = machine.text(f"{group}/cpu.cfs_quota_us")
        period = machine.text(f"{group}/cpu.cfs_period_us")
    # Without a quota it is `max` in version 2, -1 in version 1.
    if quota.isdecimal():
        yield int(quota) / int(period)


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Huge pages speed up caches in host memory (large reads: 17.5 instead of 10.3 GB/s), not in GPU memory."""
    # The kernel writes the chosen mode in brackets: `always [madvise] never`.
    modes = machine.text("sys/kernel/mm/transparent_hugepage/enabled")
    mode = modes.partition("[")[2].partition("]")[0]
    found = f"transparent: {mode}"
    if not mode:
        yield ok("the kernel has no transparent huge pages")
    elif machine.gpus:
        yield ok(found)
    elif mode == "never":
        yield look(
            f"{found}: reads of caches in host memory are slower than they could be",
            f"echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; export {THP_VARIABLE}=1",
        )
    elif machine.environ.get(THP_VARIABLE) != "1":
        yield look(
            f"{found}, and {THP_VARIABLE} is not set: caches in host memory are in small pages",
            f"export {THP_VARIABLE}=1: torch puts large CPU tensors on huge pages; large reads were 1.7 times as fast",
        )
    else:
        yield ok(f"{found}, {THP_VARIABLE}=1")


def _has_capability(machine: Machine, capability: int) -> bool:
    """Whether this process has a capability of the kernel, by its number."""
    status = machine.text("proc/self/status")
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> capability & 1)
