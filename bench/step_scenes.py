"""Leases, loads and blocks beside the handovers, in each of the sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FabricKind = Literal["memory", "nixl"]


@dataclass(frozen=True)
class Scene:
    """Leases and loads beside the handovers, of which there is one per step.

    Attributes:
        leases, lease_blocks: held by the producer, and the blocks of each.
        loads, load_blocks: in flight to the consumer, and the blocks of each.
        blocks: of each request that is handed over; 0 for steps in which nothing happens.
    """

    leases: int = 1
    lease_blocks: int = 10
    loads: int = 0
    load_blocks: int = 100
    blocks: int = 32
    fabric: FabricKind = "memory"

    @property
    def blocks_in_flight(self) -> int:
        return self.loads * self.load_blocks


@dataclass(frozen=True)
class Sweep:
    """Scenes that differ in one thing, the smallest first."""

    name: str
    scenes: tuple[Scene, ...]


LEASES = Sweep(
    "leases held", tuple(Scene(leases=count) for count in (1, 10, 100, 1000, 10_000))
)
LOADS = Sweep(
    "loads in flight", tuple(Scene(loads=count) for count in (0, 1, 10, 100, 1000))
)
BLOCKS = Sweep(
    "blocks in flight",
    tuple(Scene(loads=100, load_blocks=size) for size in (1, 10, 100, 1000)),
)
EVERYTHING = Sweep("10,000 leases and 1,000 loads", (Scene(leases=10_000, loads=1000),))
IDLE = Sweep(
    "nothing happens", (Scene(blocks=0), Scene(leases=10_000, loads=1000, blocks=0))
)
REQUESTS = Sweep(
    "blocks of one request",
    tuple(Scene(blocks=size) for size in (2, 32, 320, 1000, 4000)),
)
NIXL = Sweep("NIXL", (Scene(leases=100, fabric="nixl"),))

SCENES = (LEASES, LOADS, BLOCKS, EVERYTHING, IDLE, REQUESTS, NIXL)

QUICK = (
    *(
        Sweep(one.name, (one.scenes[0], one.scenes[-1]))
        for one in (LEASES, LOADS, BLOCKS, REQUESTS)
    ),
    NIXL,
)
"""Ends of sweeps, for orientation."""
