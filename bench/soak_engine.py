"""An engine of a soak: a rig engine with a pool of blocks, whose free blocks are watched, and that can be killed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.soak_fabric import SoakFabric
from bench.soak_memory import SoakMemory
from kvferry.protocol.ids import epoch_to_text
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.params import RemotePrefill, Ticket
from kvferry.protocol.params_mac import sign_params
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import FerryWorker
from tests.geometry.caches import Side, carve
from tests.geometry.models import Model
from tests.geometry.pairs import cache_groups
from tests.rig.cache_engine import HOST, CacheEngine

LEASE_S = 1.5
LOAD_TIMEOUT_S = 2.5
SETTINGS = WorkerSettings(
    lease_slots=64,
    handshake_timeout_s=10.0,
    load_timeout_s=LOAD_TIMEOUT_S,
    max_loads=64,
    staging_pool_bytes=0,
    failed_read_grace_s=1.0,
)
STAGED = replace(SETTINGS, staging_pool_bytes=1 << 18)


@dataclass(slots=True)
class Landed:
    """Reports of one load: the workers that have reported it, and the reason if it failed."""

    workers: set[int]
    reason: FailureReason | None = None


class SoakEngine(CacheEngine):
    """One life of one engine.

    Attributes:
        free: scheduler blocks that are not in use.
        spoilt: blocks that were written while they were free.
        is_dead: it was killed.
    """

    def __init__(self, name: str, model: Model, side: Side, settings: WorkerSettings, port: int | None = None) -> None:
        self.fabrics: list[SoakFabric] = []
        self.memories = [SoakMemory(carve(model, side, place)) for place in side.shards.places()]
        caches = [(place, memory.kv) for place, memory in zip(side.shards.places(), self.memories, strict=True)]
        super().__init__(name, cache_groups(model, side), side.shards.topology, caches, self._make_fabric, settings)
        self.leases = ProducerLedger(settings.lease_slots, LEASE_S, self.counters)
        if port is not None:
            self.listener.close()
            self.listener, self.port = SideChannelListener(HOST, port, self.counters), port
            self.listener.publish(self.description)
        self.block_tokens = side.blocks[0].block_tokens
        self.ratio = side.blocks[0].ratio
        self.blocks = side.blocks[0].count - 1
        self.free = list(range(1, side.blocks[0].count))
        self.spoilt = 0
        self.is_dead = False
        self.loads_seen: dict[str, Landed] = {}
        self.leased: dict[str, tuple[int, ...]] = {}
        self.alive: list[frozenset[str]] = [frozenset() for _ in self.workers]
        self.moved_bytes = 0
        self.staged_bytes = 0
        self._sent: dict[str, int] = {}

    def take(self, count: int) -> tuple[int, ...]:
        """Blocks for a request; counts those that were written since they were freed."""
        blocks = tuple(self.free.pop(0) for _ in range(count))  # the one that has been free for longest
        self.spoilt += sum(not memory.holds(self._kernel([block])) for block in blocks for memory in self.memories)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks that are not read or written any more."""
        for memory in self.memories:
            memory.fill(self._kernel(blocks))
        self.free += blocks

    def write(self, blocks: Sequence[int], tokens: int, seed: int) -> None:
        """A prompt's first tokens are computed here."""
        for memory in self.memories:
            memory.write(self._kernel(blocks), tokens, seed)

    def wrong_bytes(self, blocks: Sequence[int], tokens: int, seed: int) -> int:
        """Over all workers."""
        return sum(memory.wrong_bytes(self._kernel(blocks), tokens, seed) for memory in self.memories)

    def offer(self, request_id: str, blocks: tuple[int, ...], tokens: int) -> RemotePrefill | None:
        """The prompt is computed; its blocks are leased from the next step on. None when it has no lease."""
        lease = self.leases.finish(request_id)
        if lease is None:
            return None
        self.leased[request_id] = blocks
        ticket = Ticket(
            version=1,
            boot=self.boot,
            lease_slot=lease.slot,
            lease_epoch=epoch_to_text(lease.epoch),
            lease_s=LEASE_S,
            digests=("0" * 32,),
            mac="0" * 64,
        )
        params = RemotePrefill(
            remote_engine_id=self.name,
            remote_request_id=request_id,
            remote_block_ids=(blocks,),
            remote_host=HOST,
            remote_port=self.port,
            tp_size=self.topology.tp,
            pp_size=self.topology.pp,
            remote_num_tokens=tokens,
            kvferry=ticket,
        )
        return sign_params(params, self._mac_key)

    def landed(self, request_id: str) -> Landed | None:
        """Outcome of a load, once every worker has reported it."""
        found = self.loads_seen.get(request_id)
        return found if found is not None and len(found.workers) == len(self.workers) else None

    def is_alive(self, request_id: str) -> bool:
        """Whether something may still write into a failed load's blocks."""
        return any(request_id in alive for alive in self.alive)

    def kill(self) -> threading.Thread:
        """End without notifying any peer. The memory stays mapped, with other content, as long as this object lives.

        Returns:
            A thread that ends when all of its threads have.
        """
        self.is_dead = True
        self.listener.close()
        thread = threading.Thread(target=self._close_later, name="soak-close")
        thread.start()
        return thread

    def _close_later(self) -> None:
        self.renewer.close()
        for worker in self.workers:
            worker.close()
        for memory in self.memories:
            memory.fill(range(self.blocks * self.ratio), 0xDD)

    def _make_fabric(self, agent_name: str) -> Fabric:
        self.fabrics.append(SoakFabric(agent_name))
        return self.fabrics[-1]

    def _kernel(self, blocks: Sequence[int]) -> list[int]:
        return [block * self.ratio + part for block in blocks for part in range(self.ratio)]

    def _collect(self, worker: FerryWorker) -> None:
        index = self.workers.index(worker)
        results = worker.take_results()
        self.moved_bytes += sum(load.transferred_bytes for load in results.good_loads)
        self.staged_bytes += sum(load.staged_bytes for load in results.good_loads)
        self.counts.update(results.counts)
        if results.alive is not None:
            self.alive[index] = results.alive
        for request_id in results.sent:
            self._sent[request_id] = self._sent.get(request_id, 0) + 1
            if self._sent[request_id] == len(self.workers):
                del self._sent[request_id]
                self.leases.sent(request_id)
                self.give_back(self.leased.pop(request_id))
        for request_id in results.loaded:
            self._landed(request_id, index, None)
        for request_id, reason in results.failed.items():
            self._landed(request_id, index, reason)

    def _landed(self, request_id: str, worker: int, reason: FailureReason | None) -> None:
        """As the connector's scheduler half: the first failure ends the load, the last good report completes it."""
        found = self.loads_seen.setdefault(request_id, Landed(set()))
        found.workers.add(worker)
        if reason is not None and found.reason is None:
            found.reason = reason
            self.loads.failed(request_id)
        if found.reason is None and len(found.workers) == len(self.workers):
            self.loads.loaded(request_id)
