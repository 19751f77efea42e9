"""The kernel's part: processors, huge pages, clock, and reading another process's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvferry.cli.doctor.findings import Finding, broken, look, ok

_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_COARSE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Processors:
    """What computes.

    Attributes:
        allowed: cores that this process may run on.
        quota: cores' worth of time that its cgroup gives it; None for no limit.
        omp_threads: OMP_NUM_THREADS, None where it is not set.
    """

    allowed: int
    quota: float | None
    omp_threads: int | None


@dataclass(frozen=True, slots=True)
class HugePages:
    """transparent: `always`, `madvise` or `never`, None where the kernel has none. reserved: pages set aside."""

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
        ptrace_scope: yama's, None where the kernel has no yama.
        may_trace: whether this process has CAP_SYS_PTRACE.
    """

    refused: str
    ptrace_scope: int | None
    may_trace: bool


def judge_processors(processors: Processors, gpus: int) -> Finding:
    """A quota below the threads that run stops all of them, the transfer thread too, for the rest of every 100 ms."""
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
        found = f"{found}, and {threads} threads compute: all are stopped when it is used up"
        return look(check, found, f"export OMP_NUM_THREADS={fitting}, or raise the quota")
    return ok(check, found)


def judge_huge_pages(pages: HugePages, gpus: int) -> Finding:
    """They help caches in host memory (large reads: 17.5 instead of 10.3 GB/s) and do nothing for GPU memory."""
    check = "huge pages"
    if pages.transparent is None:
        return ok(check, f"none transparent; {pages.reserved} reserved")
    found = f"transparent: {pages.transparent}; {pages.reserved} reserved"
    if pages.transparent == "never" and not gpus:
        do = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return look(check, f"{found}: reads of host memory are slower than they could be", do)
    return ok(check, found)


def judge_clock(clock: Clock) -> Finding:
    """Only the monotonic clock matters: no clock reading ever leaves a process, durations do."""
    check = "clock"
    if not clock.ahead:
        do = "nothing that kvferry could do: leases would not end. Look at dmesg for clocksource, or at the hypervisor"
        return broken(check, "the monotonic clock went back", do)
    source = f", source {clock.source}" if clock.source else ""
    found = f"monotonic, {clock.resolution_s * 1e9:.0f} ns{source}"
    if clock.resolution_s > _COARSE_S or clock.source in _SLOW_CLOCKS:
        do = "boot with clocksource=tsc, or kvm-clock in a virtual machine"
        return look(check, f"{found}: slow to read, and it is read in every step", do)
    return ok(check, f"{found}; wall clocks may differ between hosts, since only durations are sent")


def judge_foreign_memory(memory: ForeignMemory) -> Finding:
    """Without it UCX reads host memory of peers on this host by messages, which the peer must serve."""
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
