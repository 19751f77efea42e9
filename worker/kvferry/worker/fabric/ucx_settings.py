"""The UCX settings that kvferry sets in the environment where it leaves them open, and the grace that follows from
UCX's own.

UCX reads its environment when an agent is made, so `apply_ucx_defaults` runs before that. What the operator has set
always stays. What `UCX_TLS` excludes is left alone: UCX warns of settings that nothing uses.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, MutableMapping

logger = logging.getLogger(__name__)

# UCX knows a transport by its own name and by names of groups; any of them admits it in `UCX_TLS`.
_SHARED_MEMORY = frozenset({"sm", "shm", "mm", "posix", "sysv", "xpmem"})
# Behind `^`, only these names exclude shared memory altogether: `^posix` leaves `sysv`.
_ALL_SHARED_MEMORY = frozenset({"sm", "shm", "mm"})
_TCP = frozenset({"tcp"})
_CUDA_IPC = frozenset({"cuda", "cuda_ipc"})
_RDMA = frozenset(
    {"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"}
)

NO = frozenset({"n", "no", "off", "0"})
"""The words by which UCX switches a setting off."""

YES = frozenset({"y", "yes", "on", "1"})
"""The words by which UCX switches a setting on."""

# The posted parts of a failed transfer have been cancelled, but NIXL cannot report whether in time.
# Bytes under way are written as soon as the network delivers them, or never, once the connection
# gives up. With UCX's defaults a queue pair gives up after 7 retries of 1 s (`UCX_RC_RETRY_COUNT`,
# `UCX_RC_TIMEOUT`), which hardware may stretch four times: about half a minute. The grace is twice
# that. It is a bound for networks, not for stopped peers: one that was stopped while it served a
# read by messages (TCP) may answer whenever it continues. So far only lost peers have been seen to
# fail reads over UCX; the grace covers cases that have not been seen.
FAILED_READ_GRACE_S = 60.0
"""How long memory stays out of use after a read into it has failed."""

GPU_READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
"""The setting that lets UCX read over CUDA IPC."""


def ucx_defaults(environ: Mapping[str, str], *, has_cuda: bool) -> dict[str, str]:
    """UCX settings that kvferry wants and that `environ` does not set.

    Args:
        has_cuda: UCX finds CUDA's driver.
    """
    has_tcp = uses_tcp(environ)
    wanted: dict[str, str] = {}
    if _may_use(environ, _SHARED_MEMORY, _ALL_SHARED_MEMORY):
        wanted |= _shared_memory_settings(environ, has_tcp=has_tcp)
    if has_tcp:
        # UCX's 8 KiB made reads of 1 MiB and more two to five times slower. Memory per connection
        # was the same within 0.05 MB.
        wanted["UCX_TCP_TX_SEG_SIZE"] = "256k"
        wanted["UCX_TCP_RX_SEG_SIZE"] = "256k"
    if has_cuda and _may_use(environ, _CUDA_IPC, _CUDA_IPC):
        # `auto`, UCX's default, reads over CUDA IPC only where NVML names the other end of every
        # NVLink of GPU 0: not on nodes with PCIe alone, and not in virtual machines that hide the
        # links. There a read between GPUs of one host went over loopback TCP at 2 GB/s, without a
        # warning. GPUs that cannot reach each other are left out by UCX either way.
        wanted[GPU_READS] = "y"
    return {name: value for name, value in wanted.items() if name not in environ}


def _shared_memory_settings(
    environ: Mapping[str, str], *, has_tcp: bool
) -> dict[str, str]:
    wanted: dict[str, str] = {}
    # Messages within a host go over loopback TCP, UCX's default, although shared memory takes 5 µs
    # instead of 28: there, a process that is killed in the middle of a message, or stopped for
    # long, can hang others (docs/reliability.md). Without TCP there is no choice: with `sm,self`
    # alone no agent can be made unless UCX handles errors of shared memory.
    if not has_tcp:
        wanted["UCX_MM_ERROR_HANDLING"] = "y"
    default = "n" if has_tcp else "y"
    error_handling = environ.get("UCX_MM_ERROR_HANDLING", default).lower()
    if error_handling not in NO:
        # Keepalives to a peer that does not receive them (frozen, or closed in a process that
        # lives) fill its queue of 256. Then NIXL's progress thread spins on a core, and closing
        # the agent hangs: with UCX's 20 s after 85 minutes with one peer and 11 with eight, with
        # 300 s after 21 hours. Not `inf`: over shared memory alone, a read that is posted to a
        # dead peer ends with the next keepalive, or never.
        wanted["UCX_KEEPALIVE_INTERVAL"] = "300s"
    return wanted


def slow_within_host(
    environ: Mapping[str, str], *, is_device: bool, shares_ipc: bool, has_rdma: bool
) -> str | None:
    """Why UCX reads memory of another process of this host over loopback TCP, and what helps; None if it need not.

    UCX does not tell which way a read takes, so it is judged by what its settings and the containers leave open.

    Args:
        is_device: the memory is that of GPUs.
        shares_ipc: both processes are in one IPC namespace.
        has_rdma: there is an RDMA device, over which reads within the host may go, too.
    """
    if has_rdma and _may_use(environ, _RDMA, frozenset({"ib"})):
        return None
    transports = environ.get("UCX_TLS", "all")
    if is_device and not _may_use(environ, _CUDA_IPC, _CUDA_IPC):
        return f"UCX_TLS={transports} leaves out cuda_ipc; unset it, or admit cuda_ipc"
    if is_device and environ.get(GPU_READS, "y").lower() in NO:
        return f"{GPU_READS}={environ[GPU_READS]}; unset it"
    ways = _SHARED_MEMORY | {"cma"}
    if not is_device and not _may_use(environ, ways, frozenset({"sm", "shm"})):
        return f"UCX_TLS={transports} leaves out shared memory; unset it, or admit sm"
    if not shares_ipc:
        return "the two are in different IPC namespaces; start both containers with --ipc=host, or hostIPC"
    return None


def uses_tcp(environ: Mapping[str, str]) -> bool:
    """True if `UCX_TLS` admits TCP."""
    return _may_use(environ, _TCP, _TCP)


def _may_use(
    environ: Mapping[str, str], any_admits: frozenset[str], any_excludes: frozenset[str]
) -> bool:
    """True if `UCX_TLS` admits a kind of transport.

    Args:
        any_admits: names of which any one admits it.
        any_excludes: names of which any one, behind `^`, excludes it.
    """
    transports = environ.get("UCX_TLS", "all")
    names = {name.strip() for name in transports.removeprefix("^").split(",")}
    if transports.startswith("^"):
        return names.isdisjoint(any_excludes)
    return "all" in names or not names.isdisjoint(any_admits)


def apply_ucx_defaults(environ: MutableMapping[str, str]) -> None:
    """Set `ucx_defaults` in the environment of this process; UCX reads it when an agent is made."""
    chosen = ucx_defaults(environ, has_cuda=_has_cuda_driver())
    environ.update(chosen)
    for name, value in chosen.items():
        logger.info("set %s=%s, which the environment does not set", name, value)


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
