"""What an operator decides for a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Attributes:
    lease_slots: size of the lease table.
    handshake_timeout_s: how long a producer may take to describe itself, and again to answer the first read.
    load_timeout_s: how long a load may take from its order to its last byte; afterwards it has failed.
    max_loads: loads that may be in flight at once; more of them wait their turn.
    """

    lease_slots: int = 4096
    handshake_timeout_s: float = 5.0
    load_timeout_s: float = 60.0
    max_loads: int = 1024
