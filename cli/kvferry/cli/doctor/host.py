"""Checks of the kernel: limits, memory, processors, huge pages, clock, and reads of another process's memory.

On other systems than Linux most facts are unknown.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.doctor.findings import Finding, broken, look, ok
from kvferry.cli.doctor.limits import SHM, Limits, SharedMemory

_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_COARSE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Processors:
    """Cores and their limits.

    Attributes:
        allowed: cores that this process may run on.
        quota: CPU quota of its cgroup, in cores; None for no limit.
        omp_threads: OMP_NUM_THREADS, None if it is not set.
    """

    allowed: int
    quota: float | None
    omp_threads: int | None


@dataclass(frozen=True, slots=True)
class HugePages:
    """transparent: `always`, `madvise` or `never`, None if the kernel has none. reserved: number of reserved pages."""

    transparent: str | None
    reserved: int


@dataclass(frozen=True, slots=True)
class Clock:
    """resolution_s: of the monotonic clock. ahead: it never went back. source: the kernel's, None if unknown."""

    resolution_s: float
    ahead: bool
    source: str | None


@dataclass(frozen=True, slots=True)
class ForeignMemory:
    """Whether one process may read another's memory (`process_vm_readv`, UCX's CMA).

    Attributes:
        refused: the errno's name of a real attempt, `""` if it worked.
        ptrace_scope: yama's, None if the kernel has no yama.
        may_trace: whether this process has CAP_SYS_PTRACE.
    """

    refused: str
    ptrace_scope: int | None
    may_trace: bool


def judge_processors(processors: Processors, gpus: int) -> Finding:
    """With a quota below the number of running threads, all of them, the transfer thread too, stop for part of every
    100 ms."""
    check = "processors"
    threads = processors.omp_threads or processors.allowed
    if processors.quota is None:
        return ok(check, f"{processors.allowed} cores, no quota")
    found = f"{processors.allowed} cores, a quota of {processors.quota:g}"
    if processors.quota < 1 + gpus:
        do = "a core per worker and one for the engine: Kubernetes: resources.limits.cpu; Docker: --cpus"
        return look(check, f"{found} for {gpus} GPU workers and their engine" if gpus else found, do)
    if processors.quota < threads:
        fitting = max(1, math.floor(processors.quota))
        found = f"{found}, and {threads} threads compute: all stop when it is used up"
        return look(check, found, f"export OMP_NUM_THREADS={fitting}, or raise the quota")
    return ok(check, found)


def judge_huge_pages(pages: HugePages, gpus: int) -> Finding:
    """Huge pages speed up caches in host memory (large reads: 17.5 instead of 10.3 GB/s), not in GPU memory."""
    check = "huge pages"
    if pages.transparent is None:
        return ok(check, f"none transparent; {pages.reserved} reserved")
    found = f"transparent: {pages.transparent}; {pages.reserved} reserved"
    if pages.transparent == "never" and not gpus:
        do = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return look(check, f"{found}: reads of host memory are slower than they could be", do)
    return ok(check, found)


def judge_clock(clock: Clock) -> Finding:
    """Only the monotonic clock matters: processes exchange durations, never clock readings."""
    check = "clock"
    if not clock.ahead:
        do = "check clocksource in dmesg, or the hypervisor; with such a clock leases may never end"
        return broken(check, "the monotonic clock went back", do)
    source = f", source {clock.source}" if clock.source else ""
    found = f"monotonic, {clock.resolution_s * 1e9:.0f} ns{source}"
    if clock.resolution_s > _COARSE_S or clock.source in _SLOW_CLOCKS:
        do = "boot with clocksource=tsc, or kvm-clock in a virtual machine"
        return look(check, f"{found}: slow to read, and it is read in every step", do)
    return ok(check, f"{found}; wall clocks may differ between hosts, since only durations are sent")


def judge_foreign_memory(memory: ForeignMemory) -> Finding:
    """Without `process_vm_readv` UCX reads host memory of peers on this host by messages, which the peer must serve."""
    check = "reads between processes"
    scope = "no yama" if memory.ptrace_scope is None else f"ptrace_scope {memory.ptrace_scope}"
    cap = "with CAP_SYS_PTRACE" if memory.may_trace else "without CAP_SYS_PTRACE"
    if not memory.refused:
        return ok(check, f"process_vm_readv works ({scope}, {cap})")
    refused = f"process_vm_readv was refused with {memory.refused} ({scope}, {cap})"
    found = f"{refused}: host memory on this host is read more slowly"
    if memory.ptrace_scope in (2, 3) and not memory.may_trace:
        return look(check, found, "sysctl kernel.yama.ptrace_scope=1 on the host (from 3 only by a reboot)")
    return look(
        check, found, "Docker: --cap-add SYS_PTRACE; Kubernetes: securityContext.capabilities.add: [SYS_PTRACE]"
    )


_CAP_IPC_LOCK = 14
_CAP_SYS_PTRACE = 19
_PR_SET_PTRACER = 0x59616D61
_READ_ANOTHER = """
import ctypes, os, sys
class Part(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]
pid, address = int(sys.argv[1]), int(sys.argv[2])
into = ctypes.create_string_buffer(8)
mine, theirs = Part(ctypes.addressof(into), 8), Part(address, 8)
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
read.restype = ctypes.c_ssize_t
got = read(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
print(0 if got == 8 and into.raw == b"kvferry!" else ctypes.get_errno() or -1)
"""


def gather_limits() -> Limits:
    """The limits of this process."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(_limit(locked), _has(_CAP_IPC_LOCK), _limit(files), _limit(hard))


def gather_shared_memory(path: str = SHM) -> SharedMemory | None:
    """The size of `path`; None if it does not exist."""
    if not Path(path).is_dir():
        return None
    found = os.statvfs(path)
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def gather_processors(environ: Mapping[str, str], root: Path = Path("/")) -> Processors:
    """The quota is the smallest of this cgroup and its parents, of either cgroup version."""
    omp = environ.get("OMP_NUM_THREADS", "")
    quotas = [quota for folder in _cgroups(root) if (quota := _quota(folder)) is not None]
    return Processors(
        allowed=len(os.sched_getaffinity(0)),
        quota=min(quotas) if quotas else None,
        omp_threads=int(omp) if omp.isdecimal() and int(omp) else None,
    )


def gather_huge_pages(root: Path = Path("/")) -> HugePages:
    """Read both settings; the kernel writes the chosen mode in brackets: `[madvise]`."""
    transparent = root / "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = transparent.read_text().partition("[")[2].partition("]")[0] if transparent.exists() else None
    lines = (root / "proc/meminfo").read_text().splitlines()
    reserved = next((line.split()[1] for line in lines if line.startswith("HugePages_Total:")), "0")
    return HugePages(chosen, int(reserved))


def gather_clock(root: Path = Path("/")) -> Clock:
    """Properties of the monotonic clock, from a thousand readings."""
    source = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    readings = [time.monotonic_ns() for _ in range(1000)]
    return Clock(
        resolution_s=time.get_clock_info("monotonic").resolution,
        ahead=readings == sorted(readings),
        source=source.read_text().strip() if source.exists() else None,
    )


def gather_foreign_memory() -> ForeignMemory:
    """A child tries to read eight bytes of this process, which permits it by `prctl`, as UCX does."""
    secret = ctypes.create_string_buffer(b"kvferry!")
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    arguments = [str(os.getpid()), str(ctypes.addressof(secret))]
    done = subprocess.run(
        [sys.executable, "-ISc", _READ_ANOTHER, *arguments], capture_output=True, text=True, timeout=5, check=True
    )
    code = int(done.stdout)
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return ForeignMemory(
        refused="" if code == 0 else errno.errorcode.get(code, f"error {code}"),
        ptrace_scope=int(scope.read_text()) if scope.exists() else None,
        may_trace=_has(_CAP_SYS_PTRACE),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _has(capability: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> capability & 1)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders that may hold a quota: this process's cgroup and its parents."""
    mounts = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            mount = mounts if number == "0" else mounts / controllers
            folder = mount / path.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one == mount or mount in one.parents)


def _quota(folder: Path) -> float | None:
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if (folder / "cpu.cfs_quota_us").exists():
        quota_us, period_us = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return None if quota_us <= 0 else quota_us / period_us
    return None
