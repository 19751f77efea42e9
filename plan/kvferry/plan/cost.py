"""The cost model: what a read takes, and whether reading in the producer's shape and relaying out would take less.

All constants are here. They are the published ones until a machine's own have been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

DIRECT_MIN_BYTES = 16 << 10
"""Run length from which a descriptor costs less than the bytes that it moves, as published for RDMA over NIXL."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The constants.

    Attributes:
        direct_min_bytes: run length at which a descriptor takes as long as its bytes.
        link_gb_s: bandwidth of the link, GB/s.
        relayout_gb_s: bandwidth of the relayout, bytes read and written, GB/s.
    """

    direct_min_bytes: int = DIRECT_MIN_BYTES
    link_gb_s: float = 50.0
    relayout_gb_s: float = 1500.0

    @property
    def descriptor_s(self) -> float:
        """What one descriptor takes beside its bytes."""
        return self.direct_min_bytes / (self.link_gb_s * 1e9)

    def read_s(self, num_bytes: float, descriptors: float) -> float:
        """What it takes to read so many bytes by so many descriptors."""
        return num_bytes / (self.link_gb_s * 1e9) + descriptors * self.descriptor_s

    def relayout_s(self, num_bytes: float) -> float:
        """What it takes to put bytes from the staging pool in place: each is read and written."""
        return 2 * num_bytes / (self.relayout_gb_s * 1e9)


PUBLISHED = Costs()
"""The published constants."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How bytes are placed, and why."""

    staged: bool
    reason: str


def choose(costs: Costs, num_bytes: int, direct_runs: int, staged_runs: int) -> Choice:
    """Choose for `num_bytes`: `direct_runs` descriptors when read in place, `staged_runs` when read as they lie.

    Runs of `direct_min_bytes` and more are never staged: there the descriptors hide behind the bytes.
    """
    length = num_bytes // direct_runs
    if length >= costs.direct_min_bytes:
        return Choice(False, f"runs of {length} B, from {costs.direct_min_bytes} B on descriptors are cheap")
    direct_s = costs.read_s(num_bytes, direct_runs)
    staged_s = costs.read_s(num_bytes, staged_runs) + costs.relayout_s(num_bytes)
    if staged_s >= direct_s:
        longest = num_bytes // staged_runs
        return Choice(False, f"runs of {length} B, and of no more than {longest} B on the producer")
    return Choice(True, f"runs of {length} B, but of {num_bytes // staged_runs} B on the producer")
