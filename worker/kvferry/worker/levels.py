"""What a worker has at present of things that go up and down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLevels:
    """One worker's levels.

    Attributes:
        peers: producers that are ready to be read from.
        staging_used_bytes: of the staging pool, those that some load has, quarantined ones included.
        staging_pool_bytes: of the whole pool; 0 without one.
    """

    peers: int
    staging_used_bytes: int
    staging_pool_bytes: int
