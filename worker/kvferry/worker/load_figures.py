"""What a good load moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What a good load moved, and how long it took.

    Attributes:
        planned_bytes, planned_descriptors: by the plan, which merges nothing.
        transferred_bytes, descriptors: as NIXL counted them, which merges neighbours: a descriptor is a run of bytes
            that lie together on both sides.
        post_s, transfer_s: as NIXL measured them, summed over the routes.
        load_s: from the order to the last byte.
        staged_bytes, waves: of the planned bytes those that went through the staging pool, and in how many waves.
    """

    planned_bytes: int
    planned_descriptors: int
    transferred_bytes: int
    descriptors: int
    post_s: float
    transfer_s: float
    load_s: float
    staged_bytes: int = 0
    waves: int = 0

    @property
    def run_bytes(self) -> float | None:
        """Mean length of a run; None where NIXL counted nothing."""
        return self.transferred_bytes / self.descriptors if self.descriptors else None
