"""What an operator decides for a worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.plan.cost import DIRECT_MIN_BYTES


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Attributes:
    lease_slots: size of the lease table.
    handshake_timeout_s: how long a producer may take to describe itself, and again to answer the first read.
    load_timeout_s: how long a load may take from its order to its last byte; afterwards it has failed.
    max_loads: loads that may be in flight at once; more of them wait their turn.
    staging_pool_bytes: what short runs are staged in; 0 for no pool, None for the default of the device.
    direct_min_bytes: run length from which nothing is staged.
    host_buffer: the fabric does not reach the caches' device: everything goes through host memory.
    """

    lease_slots: int = 4096
    handshake_timeout_s: float = 5.0
    load_timeout_s: float = 60.0
    max_loads: int = 1024
    staging_pool_bytes: int | None = None
    direct_min_bytes: int = DIRECT_MIN_BYTES
    host_buffer: bool = False
