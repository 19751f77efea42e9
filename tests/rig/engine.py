"""Engines of any shards and layouts, whose whole memory is checked."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.protocol.params import RemotePrefill
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.settings import WorkerSettings
from tests.geometry.caches import Side, carve
from tests.geometry.models import Model
from tests.geometry.pairs import cache_groups
from tests.geometry.requests import Request
from tests.rig.cache_engine import SETTINGS, CacheEngine
from tests.rig.memory import Numbers, Snapshot, WorkerMemory

__all__ = ["SETTINGS", "RigEngine"]


class RigEngine(CacheEngine):
    """One engine.

    Attributes:
        memories: of its workers.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        side: Side,
        make_fabric: Callable[[str], Fabric],
        settings: WorkerSettings,
        seed: int,
        floats: bool,
    ) -> None:
        places = side.shards.places()
        self.side = side
        self.memories = [
            WorkerMemory(carve(model, side, place), seed * 1000 + index, floats=floats)
            for index, place in enumerate(places)
        ]
        caches = [(place, memory.kv) for place, memory in zip(places, self.memories, strict=True)]
        super().__init__(name, cache_groups(model, side), side.shards.topology, caches, make_fabric, settings)

    def prefill(self, request_id: str, request: Request, numbers: Numbers) -> RemotePrefill:
        """Compute a prompt: fill all workers' shares of it and lease its blocks."""
        return self.lease(request_id, request, lambda: self.compute(request, numbers))

    def compute(self, request: Request, numbers: Numbers) -> None:
        """Write the results of the prefill to the caches of all workers."""
        for memory in self.memories:
            memory.fill(self.groups, request, numbers)

    def snapshots(self) -> list[Snapshot]:
        return [memory.snapshot() for memory in self.memories]
