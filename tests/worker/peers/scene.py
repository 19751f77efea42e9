"""A peer registry on the fake fabric, producers for it, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from kvferry.plan.planner import plan_transfer
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed
from kvferry.protocol.geometry import Place
from kvferry.protocol.handshake import (
    EngineDescription,
    LeaseTableAddress,
    WorkerDescription,
)
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.fabric.reads import FabricReader, SlotReads
from kvferry.worker.peers.first_contact import FirstReads
from kvferry.worker.peers.handshakes import HandshakeResult, OnHandshakeEnd
from kvferry.worker.peers.peer import Peer, PeerKey
from kvferry.worker.peers.registry import PeerRegistry, Unavailable
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.harness.caches import CacheShape, ToyCaches
from tests.harness.fault_fabric import FaultFabric
from tests.plan import samples
from tests.waiting import wait_until

KEY = PeerKey("10.0.0.1", 5600, "P", "0" * 32)
ENTRIES = 4
MOST_PEERS = 3
TTL_S = 3600.0


class Scene:
    """A consumer's registry, and the producer `KEY` on the fake network.

    Attributes:
        answer: of a handshake with a producer; `known` answers for those that were added.
        asked: the handshakes so far.
    """

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.network = MemoryNetwork()
        shape = CacheShape()
        self._group, self._caches, self._remote = (
            shape.group,
            ToyCaches(shape, 1),
            ToyCaches(shape, 2),
        )
        self._words = np.zeros((16, 2), dtype=np.uint64)
        self._metadata: dict[str, bytes] = {}
        self._found: dict[PeerKey, tuple[EngineDescription, TransferPlan]] = {}
        self.fabric = FaultFabric(MemoryFabric("consumer", self.network))
        self.slot_reads = SlotReads(ENTRIES)
        self.fabric.register([*self._caches.kv.regions(), self.slot_reads.region()])
        self.slot_reads.prepare(self.fabric)
        self.asked: list[PeerKey] = []
        self.answer: Callable[[PeerKey], tuple[EngineDescription, TransferPlan]] = (
            self.known
        )
        first_reads = FirstReads(
            FabricReader(self.fabric),
            self._caches.kv,
            None,
            self.slot_reads,
            timeout_s=1.0,
        )
        self.registry = PeerRegistry(
            first_reads, self._begin, lambda: None, ttl_s=ttl_s, max_peers=MOST_PEERS
        )
        self.add(KEY, "producer")

    def add(self, key: PeerKey, agent: str | None = None) -> None:
        """A producer answers for the key from now on, with an agent of its own or one that is on the network."""
        agent = agent or key.engine_id
        if agent not in self._metadata:
            producer = MemoryFabric(agent, self.network)
            slots = Region(self._words.ctypes.data, self._words.nbytes, MemoryKind.DRAM)
            producer.register([*self._remote.kv.regions(), slots])
            self._metadata[agent] = producer.metadata()
        here, there = (
            self._engine("C", self._caches, b"-"),
            self._engine(key.engine_id, self._remote, self._metadata[agent]),
        )
        self._found[key] = (there, plan_transfer(here, 0, there))

    def add_fleet(self, count: int) -> list[PeerKey]:
        """Producers `P0`, `P1`, …, at addresses of their own."""
        keys = [
            KEY._replace(host=f"10.0.1.{number}", engine_id=f"P{number}")
            for number in range(count)
        ]
        for key in keys:
            self.add(key)
        return keys

    def known(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        return self._found[key]

    def refuse(self, _: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        raise HandshakeFailed("no answer")

    def settle(self, now_s: float, in_use: Collection[PeerKey] = ()) -> None:
        """Let the handshakes end, and their first reads, unless the producer is frozen."""

        def answered() -> bool:
            self.registry.step(now_s, in_use)
            return not len(self.registry.snapshot().handshakes)

        wait_until(answered, "all handshakes have ended", 60.0)
        self.registry.step(now_s, in_use)
        self.registry.step(now_s, in_use)

    def connect(
        self, now_s: float, key: PeerKey = KEY, in_use: Collection[PeerKey] = ()
    ) -> Peer | Unavailable | None:
        """Ask for the peer as a load does, until it is connected or cannot be."""
        self.registry.get(key, now_s)
        self.settle(now_s, in_use)
        return self.registry.get(key, now_s)

    def prewarm(self, now_s: float, key: PeerKey = KEY) -> None:
        """Only waiting requests name the peer."""
        self.registry.prewarm(key, now_s)
        self.settle(now_s)

    def prewarm_static(self, now_s: float, key: PeerKey = KEY) -> None:
        """The configuration names the peer, and it has answered."""
        self.registry.prewarm_static(key, now_s)
        self.settle(now_s)

    def close(self) -> None:
        self.registry.close()
        self.fabric.close()

    def nothing_is_left(self) -> bool:
        """Whether only the list of the slot reads is prepared, and nothing else is in use."""
        in_use = (
            self.fabric.transfers() or self.fabric.peers or self.fabric.prepared() != 1
        )
        return not in_use and self.slot_reads.free() == ENTRIES

    def _begin(self, key: PeerKey, on_end: OnHandshakeEnd) -> None:
        self.asked.append(key)
        result: HandshakeResult
        try:
            result = self.answer(key)
        except Exception as error:  # noqa: BLE001 - as a handshake does
            result = error
        on_end(result)

    def _engine(
        self, name: str, caches: ToyCaches, metadata: bytes
    ) -> EngineDescription:
        worker = WorkerDescription(
            place=Place(),
            agent=name,
            agent_metadata=metadata,
            memory="DRAM",
            device=0,
            lease_table=LeaseTableAddress(
                address=self._words.ctypes.data, slots=len(self._words)
            ),
            tensors=caches.kv.tensors,
        )
        return samples.engine(workers=[worker], engine_id=name, groups=(self._group,))
