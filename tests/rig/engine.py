"""Engines of any shards and layouts, whose whole memory is checked."""

from __future__ import annotations

from typing import Any

from kvferry.protocol.params import RemotePrefill
from kvferry.worker.settings import MappedReadsOption, WorkerSettings
from kvferry.worker.worker import MakeFabric
from tests.geometry.caches import Side, carve
from tests.geometry.models import Model
from tests.geometry.pairs import FACTS, cache_groups
from tests.geometry.requests import Request
from tests.harness import handover
from tests.harness.cache_engine import CacheEngine
from tests.rig.memory import Bytes, Numbers, WorkerMemory

SETTINGS = WorkerSettings(
    lease_slots=8,
    handshake_timeout_s=60.0,
    load_timeout_s=120.0,
    max_loads=8,
    staging_pool_bytes=1 << 16,
    mapped_reads=MappedReadsOption.OFF,
)


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
        make_fabric: MakeFabric,
        settings: WorkerSettings = SETTINGS,
        *,
        seed: int,
        floats: bool = False,
        **more: Any,
    ) -> None:
        places = side.shards.places()
        self.side = side
        self.memories = [
            WorkerMemory(carve(model, side, place), seed * 1000 + index, floats=floats)
            for index, place in enumerate(places)
        ]
        shards = [
            (place, memory.kv)
            for place, memory in zip(places, self.memories, strict=True)
        ]
        groups, topology = cache_groups(model, side), side.shards.topology
        more = {"facts": FACTS, "lease_s": 120.0, **more}
        super().__init__(
            name, make_fabric, shards, groups, topology, settings=settings, **more
        )

    def prefill(
        self, request_id: str, request: Request, numbers: Numbers
    ) -> RemotePrefill:
        """Compute a prompt: fill all workers' shares of it and lease its blocks."""
        return handover.lease(
            self, request_id, request, lambda: self.compute(request, numbers)
        )

    def compute(self, request: Request, numbers: Numbers) -> None:
        """Write the results of the prefill to the caches of all workers."""
        for memory in self.memories:
            memory.fill(self.description.groups, request, numbers)

    def snapshots(self) -> list[Bytes]:
        return [memory.snapshot() for memory in self.memories]
