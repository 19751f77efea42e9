"""Locked memory, open files, shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.cli.doctor.findings import Finding, broken, look, ok

FILES_OF_A_WORKER = 256
"""Upper estimate of the open files of a vLLM worker without peers."""
FILES_PER_PEER = 2
"""Minimum: a connection of UCX over TCP, and one of the side channel. The loopback may count more."""
MANY_PEERS = 64
FEW_PEERS = 4

SHM = "/dev/shm"  # noqa: S108 - it is what is looked at
SHM_WANTED = 1 << 30
SHM_NEEDED = 96 << 20
"""Docker's default is 64 MiB, in which the queues of a vLLM engine with several workers do not fit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this process, and so of an engine that is started in the same way.

    Attributes:
        locked_bytes: RLIMIT_MEMLOCK; None for no limit.
        may_lock: whether CAP_IPC_LOCK lifts that limit.
        files: RLIMIT_NOFILE, soft; None for no limit.
        files_hard: RLIMIT_NOFILE, hard: the soft limit can be raised to it without root.
    """

    locked_bytes: int | None
    may_lock: bool
    files: int | None
    files_hard: int | None


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """`/dev/shm`, in bytes."""

    total_bytes: int
    free_bytes: int


def judge_locked_memory(limits: Limits, ports: int) -> Finding:
    """RDMA registers memory by locking it. `ports`: how many RDMA ports there are."""
    check = "locked memory"
    if limits.locked_bytes is None:
        return ok(check, "no limit")
    shown = _shown(limits.locked_bytes)
    if limits.may_lock:
        return ok(check, f"limit {shown}, lifted by CAP_IPC_LOCK")
    if not ports:
        return ok(check, f"limit {shown}; nothing here locks memory without an RDMA device")
    do = "ulimit -l unlimited; Docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
    return broken(check, f"limit {shown}: a cache cannot be registered with an RDMA device", do)


def judge_files(limits: Limits, files_per_peer: int | None) -> Finding:
    """The number of peer workers that the limit allows. `files_per_peer`: counted by the loopback, None if unknown."""
    check = "open files"
    if limits.files is None:
        return ok(check, "no limit")
    each = max(FILES_PER_PEER, files_per_peer or 0)
    peers = max(0, limits.files - FILES_OF_A_WORKER) // each
    found = f"limit {limits.files}: room for {peers} peer workers, at {each} files each"
    if peers >= MANY_PEERS:
        return ok(check, found)
    hard = limits.files_hard
    raised = 65536 if hard is None else min(65536, hard)
    how = f"ulimit -n {raised}" if raised > limits.files else "raise the hard limit as root"
    do = f"{how}; Docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536"
    return broken(check, found, do) if peers < FEW_PEERS else look(check, found, do)


def judge_shared_memory(shm: SharedMemory | None) -> Iterator[Finding]:
    """The size of `/dev/shm`; None if there is none."""
    check, do = "shared memory", "Docker: --shm-size=8g; Kubernetes: an emptyDir with medium Memory mounted there"
    if shm is None:
        yield broken(check, f"{SHM} is not there", do)
        return
    found = f"{SHM} has {_shown(shm.free_bytes)} of {_shown(shm.total_bytes)} free"
    if shm.free_bytes < SHM_NEEDED:
        yield broken(
            check,
            f"{found}: too little for an engine's queues and UCX",
            f"{do}; or remove files of dead engines from it",
        )
    elif shm.free_bytes < SHM_WANTED:
        yield look(check, found, f"{do}; or remove files of dead engines from it")
    else:
        yield ok(check, found)


def _shown(amount: int) -> str:
    """As `kvferry.cli.formatting.binary_bytes`, which needs msgspec, and that may be missing."""
    return f"{amount / (1 << 30):.1f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):.0f} MiB"
