"""Facts from the kernel: limits, memory, processors, clock, tracing. Elsewhere than on Linux most are unknown."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvferry.cli.doctor.host import Clock, ForeignMemory, HugePages, Processors
from kvferry.cli.doctor.limits import SHM, Limits, SharedMemory

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
    """Of this process."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(_limit(locked), _has(_CAP_IPC_LOCK), _limit(files), _limit(hard))


def gather_shared_memory(path: str = SHM) -> SharedMemory | None:
    """None where it is not there."""
    if not Path(path).is_dir():
        return None
    found = os.statvfs(path)
    return SharedMemory(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def gather_processors(environ: Mapping[str, str], root: Path = Path("/")) -> Processors:
    """The quota is the smallest of this cgroup and those above it, of either version."""
    omp = environ.get("OMP_NUM_THREADS", "")
    quotas = [quota for folder in _cgroups(root) if (quota := _quota(folder)) is not None]
    return Processors(
        allowed=len(os.sched_getaffinity(0)),
        quota=min(quotas) if quotas else None,
        omp_threads=int(omp) if omp.isdecimal() and int(omp) else None,
    )


def gather_huge_pages(root: Path = Path("/")) -> HugePages:
    """`[madvise]` in brackets is the one that is chosen."""
    transparent = root / "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = transparent.read_text().partition("[")[2].partition("]")[0] if transparent.exists() else None
    lines = (root / "proc/meminfo").read_text().splitlines()
    reserved = next((line.split()[1] for line in lines if line.startswith("HugePages_Total:")), "0")
    return HugePages(chosen, int(reserved))


def gather_clock(root: Path = Path("/")) -> Clock:
    """A thousand readings."""
    source = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    readings = [time.monotonic_ns() for _ in range(1000)]
    return Clock(
        resolution_s=time.get_clock_info("monotonic").resolution,
        ahead=readings == sorted(readings),
        source=source.read_text().strip() if source.exists() else None,
    )


def gather_foreign_memory() -> ForeignMemory:
    """A child tries to read eight bytes of this process; like UCX, this process allows it as far as it may."""
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
    """Folders that may hold a quota: this process's group and all above it."""
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
