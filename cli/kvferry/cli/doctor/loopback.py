"""The loopback transfer: two child processes read each other's memory over NIXL, first in the host, then on GPU 0.

It is the benchmark of `kvferry bench` with few reads. UCX's log of it is checked too.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence

import msgspec

from kvferry.cli.doctor.devices import Machine
from kvferry.cli.doctor.findings import Finding, broken, look, not_done, ok
from kvferry.cli.transfer.child import (
    COMMAND,
    LOADING,
    Child,
    check_installed,
    measure,
)
from kvferry.cli.transfer.messages import (
    Device,
    Kind,
    Measured,
    Offer,
    ReadsFailed,
    Task,
)
from kvferry.worker.fabric.ucx_settings import GPU_READS

# Load per core above which a missed deadline proves nothing.
BUSY = 2.0
# Slower transfers point to a wrong transport, or to a busy machine.
SLOW_GB_S: dict[Kind, float] = {"DRAM": 0.5, "VRAM": 5.0}
# Of the doctor's time, for ending the processes.
_ENDING_S = 1.5
# Without progress a read counts as hanging; it is reported every 0.25 s.
_STUCK_S = 2.0
# Larger reads show no more, and take the doctor's time.
_MAX_BYTES = 16 << 20
_VERSION = re.compile(
    r"UCX +INFO +Version ([0-9.]+) \(loaded from (?:\S*/(nixl_\w+)\.libs/)?"
)
_UNUSED = re.compile(r"UCX +WARN +unused environment variables?: (.+)")


def check_loopback(
    machine: Machine, device: Device = "cpu", command: Sequence[str] = COMMAND
) -> Iterator[Finding]:
    """The transfer in host memory, the library, and the names of variables that UCX does not know.

    Args:
        device: `cuda` for the transfer alone, in the memory of GPU 0, if there are GPUs.
        command: the arguments of Python that run each of the two processes.
    """
    if device == "cuda" and not machine.gpus:
        return
    kind: Kind = "DRAM" if device == "cpu" else "VRAM"
    try:
        check_installed()
    except ReadsFailed as missing:
        yield not_done(str(missing))
        return
    limit_s = max(machine.timeout_s / 2, machine.timeout_s - _ENDING_S)
    end_s = time.monotonic() + limit_s
    task = Task(
        device=device, max_bytes=_MAX_BYTES, timeout_s=limit_s / 2, is_short=True
    )
    doing = LOADING
    is_slow = False

    def wait(what: str, silent_s: float) -> None:
        nonlocal doing, is_slow
        doing = what
        if time.monotonic() > end_s:
            is_slow = silent_s < _STUCK_S
            how = "is slow" if is_slow else "hangs"
            raise ReadsFailed(f"NIXL {how}: out of time", late=True)

    with (
        contextlib.closing(Child(command, machine.environ)) as owner,
        contextlib.closing(Child(command, machine.environ)) as reader,
    ):
        owner.send(task)
        try:
            offer = owner.take(limit_s)
            if not isinstance(offer, Offer):
                raise ReadsFailed("NIXL hangs, or is slow: out of time", late=True)
            task = msgspec.structs.replace(task, offer=offer)
            yield from judge_reads(kind, measure(reader, task, wait))
        except ReadsFailed as failed:
            yield _failure(kind, failed, doing, is_slow=is_slow)
        if kind == "DRAM":
            yield from judge_log(reader.printed())


def _failure(kind: Kind, failed: ReadsFailed, doing: str, *, is_slow: bool) -> Finding:
    """The finding about a transfer that was not completed.

    Args:
        doing: what has failed.
        is_slow: until the deadline one read after the other ended.
    """
    found = f"{failed}, while {doing}"
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    is_reading = doing != LOADING
    # A read that does not end says something about the fabric; a slow start, or a busy machine, does not.
    proves_nothing = is_slow or not is_reading or load > BUSY
    if failed.late and proves_nothing:
        do = "kvferry doctor --timeout 120, when the machine is idle"
        return look(f"{found}; load {load:.1f} per core", do)
    about = "UCX and limits" if is_reading else "versions and UCX"
    do = f"see the findings about {about}; unset every UCX_ variable and try again"
    if kind == "VRAM":
        do = "Docker: --gpus all; check the CUDA of torch and of NIXL (nixl_cu12, nixl_cu13) against nvidia-smi"
    return broken(found, do)


def judge_reads(kind: Kind, measured: Measured) -> Iterator[Finding]:
    """The rate of the largest read in one piece, and for host memory whether it went past the other process."""
    if measured.wrong:
        found = f"{measured.wrong} bytes arrived that are not the owner's"
        yield broken(found, "do not serve from this machine; report it")
        return
    in_one_piece = [reads for reads in measured.reads if reads.descriptors == 1]
    gb_s = max(in_one_piece, key=lambda reads: reads.num_bytes).gb_s
    transports = measured.transports or "transports that UCX did not name"
    found = f"{gb_s:.1f} GB/s, first contact {measured.first_contact_ms:.1f} ms, over {transports}"
    if gb_s >= SLOW_GB_S[kind]:
        yield ok(found)
    else:
        then = "reads between processes"
        if kind == "VRAM":
            then = f"{GPU_READS}, which kvferry sets to y"
        do = f"try again on an idle machine; then look at UCX_TLS and at {then}"
        yield look(found, do)
    if kind == "DRAM":
        yield _between_processes(transports)


def _between_processes(transports: str) -> Finding:
    """Whether UCX reads host memory of peers on this host directly."""
    check = "reads between processes"
    direct = re.search(r"\b(cma|xpmem|knem)\b", transports)
    if direct:
        return ok(f"UCX reads another process's memory directly ({direct[0]})", check)
    # Without `process_vm_readv` UCX reads by messages, which the peer must serve.
    return look(
        "UCX has no cma (process_vm_readv): host memory on this host is read more slowly",
        "Docker: --cap-add SYS_PTRACE; Kubernetes: securityContext.capabilities.add: [SYS_PTRACE]; on the host: "
        "sysctl kernel.yama.ptrace_scope=1; UCX_TLS, if it is set, must have cma",
        check,
    )


def judge_log(printed: str) -> Iterator[Finding]:
    """UCX's version, and the variables that it did not use, with its guesses.

    Args:
        printed: UCX's log at level info.
    """
    check = "UCX names"
    version = _VERSION.search(printed)
    if not version:
        yield not_done(
            "UCX was not started; only UCX can check the names of its variables", check
        )
        return
    yield ok(f"{version[2] or 'no wheel of NIXL'}, UCX {version[1]}", "NIXL library")
    unused = _UNUSED.search(printed)
    if unused:
        do = "correct or unset them; names of other UCX versions do nothing"
        yield look(f"UCX does not know {unused[1].strip()}", do, check)
    else:
        yield ok("UCX knows every UCX_ variable that is set", check)
