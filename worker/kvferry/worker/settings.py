"""Settings of a worker that operators choose."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.secrets import Secrets
from kvferry.plan.cost import DIRECT_MIN_BYTES
from kvferry.worker.fabric.ucx_settings import FAILED_READ_GRACE_S


class MappedReadsOption(enum.Enum):
    """What is mapped of producers on this host, and shared with consumers there. The values are the configuration's."""

    OFF = "off"
    AUTO = "auto"
    """Caches in files of host memory."""
    CUDA_IPC = "cuda_ipc"
    """Those too, and caches on a device. Never run on a chip: docs/gpu-check.md."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of one worker.

    Attributes:
        lease_slots: size of the lease table.
        handshake_timeout_s: how long a producer may take to describe itself, and again to answer the first read.
        load_timeout_s: how long a load may go without progress; afterwards it has failed.
        max_loads: loads that may be in flight at once; more of them wait their turn. Those that wait for their
            producer are not counted.
        staging_pool_bytes: size of the pool that short runs are staged in; 0 for no pool, None for the device's
            default.
        direct_min_bytes: run length from which nothing is staged.
        host_buffer: the fabric does not reach the caches' device: everything goes through host memory.
        is_read_from: peers read from this engine; if False, it keeps no copy of its caches in host memory.
        row_blocks: per cache group the most blocks of a prompt; empty if none is read before it is complete.
        secrets: of the side channel.
        allowed_hosts: of producers; None for those that need no list (`AllowedHosts.without_list`).
        peer_ttl_s: after which a producer that was not read from is forgotten; 0 or less for never.
        max_peers: producers that are known at once, not counting those that are being read from.
        failed_read_grace_s: how long memory stays out of use after a read into it has failed (`fabric.reads`).
        mapped_reads: which caches of producers of this host are read through a map of their memory, and shared so.
    """

    lease_slots: int = 4096
    handshake_timeout_s: float = 5.0
    load_timeout_s: float = 60.0
    max_loads: int = 1024
    staging_pool_bytes: int | None = None
    direct_min_bytes: int = DIRECT_MIN_BYTES
    host_buffer: bool = False
    is_read_from: bool = True
    row_blocks: tuple[int, ...] = ()
    secrets: Secrets = ()
    allowed_hosts: AllowedHosts | None = None
    peer_ttl_s: float = 3600.0
    max_peers: int = 1024
    failed_read_grace_s: float = FAILED_READ_GRACE_S
    mapped_reads: MappedReadsOption = MappedReadsOption.AUTO
