"""One worker's half of kvferry: its memory, its lease table, its transfer thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Sequence

import msgspec

from kvferry.plan.cost import Costs
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import HandshakeFailed, InvalidConfig, InvalidMessage, PeerRefused
from kvferry.protocol.geometry import Place, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, ModelFacts, WorkerDescription
from kvferry.protocol.orders import decode_head
from kvferry.protocol.params_mac import MAC_KEY_BYTES
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import Fabric, MemoryKind, Region
from kvferry.worker.fabric.reads import Reader
from kvferry.worker.leases.table import LeaseTable
from kvferry.worker.loads.load import LoadContext
from kvferry.worker.loads.results import StepResults
from kvferry.worker.loads.tail_zeroing import TailZeroing
from kvferry.worker.loads.watchdog import LoadWatchdog
from kvferry.worker.memory.caches import KvCaches
from kvferry.worker.memory.device import clock_for
from kvferry.worker.memory.slot_reads import SlotReads
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.peers.plan_cache import PlanCache
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.staging.buffer import Staging
from kvferry.worker.staging.host_buffer import HostMirror
from kvferry.worker.transfer_thread import TransferThread

logger = logging.getLogger(__name__)

_STAGING_BYTES = {"cuda": 256 << 20}
_STAGING_BYTES_OF_OTHERS = 64 << 20
"""Default sizes of the staging pool."""

_ENTRIES_PER_LOAD = 8
_MORE_ENTRIES = 4096
"""Where lease slots land: one word per producer worker and load."""

_PLANS_AT_ONCE = 4
"""Plans made at a time: planning holds the interpreter's lock, and any peer can describe engines that take seconds."""

_MOST_REHEARSED = 64
"""Most workers of an engine that plans a transfer from itself at its start; with more it takes seconds."""

MakeFabric = Callable[[str], Fabric]
"""Makes a fabric whose agent has the given name."""


class FerryWorker:
    """One worker: made once the caches exist, runs until `close`.

    Args:
        engine_id: this engine.
        place, index: this worker's place, and its index among the engine's workers.
        topology, facts, groups: of this engine.
        caches: this worker's caches, registered here and kept until `close`.
        make_fabric: the fabric; made, filled and prepared on the calling thread, then given to the transfer thread.

    Raises:
        FabricError: the fabric is not available, or refuses the memory.
        InvalidConfig: the host memory that the settings require cannot be allocated.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        place: Place,
        index: int,
        topology: Topology,
        facts: ModelFacts,
        groups: tuple[CacheGroup, ...],
        caches: KvCaches,
        settings: WorkerSettings,
        make_fabric: MakeFabric,
    ) -> None:
        self._engine_id = engine_id
        self._index = index
        self._settings = settings
        self._slot_reads = SlotReads(_ENTRIES_PER_LOAD * settings.max_loads + _MORE_ENTRIES)
        self._fabric = make_fabric(f"{engine_id}/{place}/{uuid.uuid4().hex[:12]}")
        self._staging = _staging(caches, settings)
        self._mirror = HostMirror(caches, groups) if settings.host_buffer and settings.is_read_from else None
        self._table = LeaseTable(settings.lease_slots, self._mirror)
        exported = self._mirror.caches if self._mirror is not None else caches
        # With a host buffer the fabric never accesses the caches: without a copy nothing of them is exported.
        cache_regions = exported.regions() if self._mirror is not None or not settings.host_buffer else []
        table_region = Region(self._table.address.address, self._table.num_bytes, MemoryKind.DRAM)
        pool = [self._staging.region()] if self._staging is not None else []
        self._host_memory = [*(self._mirror.memory if self._mirror is not None else ())]
        if self._staging is not None and self._staging.memory is not None:
            self._host_memory.append(self._staging.memory)
        self._fabric.register([*cache_regions, table_region, self._slot_reads.region(), *pool])
        self._slot_reads.prepare(self._fabric)
        self.description = WorkerDescription(
            place=place,
            agent=self._fabric.agent_name,
            agent_metadata=self._fabric.metadata(),
            memory=exported.kind.value,
            device=exported.device_index,
            lease_table=self._table.address,
            tensors=exported.tensors,
        )
        # This engine's description for the planner; boot and key do not matter there.
        self._engine = EngineDescription(
            engine_id=engine_id,
            boot="0" * 32,
            mac_key=bytes(MAC_KEY_BYTES),
            facts=facts,
            topology=topology,
            groups=groups,
            workers=(self._as_consumer(caches),),
        )
        self._costs = Costs(
            direct_min_bytes=settings.direct_min_bytes,
            staged_run_bytes=self._staging.longest_run if self._staging is not None else 0,
            reaches_caches=not settings.host_buffer,
        )
        self._planning = threading.Semaphore(_PLANS_AT_ONCE)
        self._side_channel = SideChannelClient(settings.secrets, name="kvferry-side-channel")
        self._plans = PlanCache(self._engine, 0, self._costs)
        self._caches = caches
        self._tail_zeroing = TailZeroing(caches)
        self._clock = clock_for(caches.device)
        self._thread: TransferThread | None = None
        self._registry: PeerRegistry | None = None
        self._watchdog = LoadWatchdog(settings.load_timeout_s)
        self._lost_orders = 0

    def add_siblings(self, workers: Sequence[WorkerDescription]) -> None:
        """Set the workers of this engine, this one at its own index: reads are spread over all of them.

        Without it, a worker plans as if it were the only one, and reports a wrong number of readers to producers with
        several. Call it before the first orders.

        Raises:
            InvalidMessage: this worker's own description is not at its index.
        """
        if len(workers) <= self._index or workers[self._index] != self.description:
            raise InvalidMessage("workers", f"{len(workers)} workers", f"this one's own description at {self._index}")
        known = list(workers)
        known[self._index] = self._as_consumer(self._caches)
        self._engine = msgspec.structs.replace(self._engine, workers=tuple(known))
        self._plans = PlanCache(self._engine, self._index, self._costs)
        self._rehearse(workers)

    def carry_out(self, head: bytes, frame: bytes) -> None:
        """Take a step's orders; returns at once, however many blocks they name. Call it on the thread that launches the
        device's work.

        Args:
            head: the head of the orders, decoded here (`encode_head`).
            frame: the orders, decoded by the transfer thread (`encode_orders`).
        """
        try:
            first = decode_head(head)
        except InvalidMessage:
            self._lost_orders += 1
            internal_errors.log("a step's orders are lost")
            return
        self._watchdog.ordered(first.loads)
        self._started(first.boot).submit(first, frame, self._clock.mark())

    def take_results(self, timeout_s: float = 0.0) -> StepResults:
        """Return the results since the last call.

        Args:
            timeout_s: while loads are under way, wait at most this long for one of them to end; 0 returns at once.
        """
        if self._thread is not None and timeout_s and self._watchdog:
            self._thread.results.wait_for_load(timeout_s)
        results = self._thread.results.take() if self._thread is not None else StepResults()
        self._watchdog.poll(results)
        if self._lost_orders:
            results.counts["lost_orders"] += self._lost_orders
            self._lost_orders = 0
        return results

    def check_integrity(self, *, idle: bool = False) -> None:
        """Check that all that was taken belongs to a live owner: entries, waves, handles, words of the lease table.

        The transfer thread does it between two steps. The call waits for it, so do not call it in an engine's step.

        Args:
            idle: also check that nothing is under way: no load, no first read, no quarantined load.

        Raises:
            LocalProtocolError: with all the sums, or the thread does not answer.
        """
        if self._thread is not None:
            self._thread.check_integrity(idle=idle)

    def close(self) -> None:
        """Stop the thread and give the memory back to the engine. Idempotent."""
        self._side_channel.close()
        if self._thread is not None and not self._thread.close():
            logger.error("the transfer thread is stuck in a call; what it uses is left alone")
            return
        if self._registry is not None:
            self._registry.close()
        self._fabric.close()
        for memory in self._host_memory:
            memory.unpin()

    def _started(self, boot: str) -> TransferThread:
        """The transfer thread; it starts with the first orders, because they bring this engine's boot."""
        if self._thread is None:
            settings = self._settings
            thread = TransferThread(self._table, settings)
            reader = Reader(self._fabric, settings.failed_read_grace_s)
            self._registry = PeerRegistry(
                reader,
                self._caches,
                self._staging,
                self._slot_reads,
                self._handshake,
                thread.wake,
                settings.handshake_timeout_s,
                ttl_s=settings.peer_ttl_s,
                most_peers=settings.max_peers,
            )
            thread.start(
                LoadContext(
                    reader=reader,
                    registry=self._registry,
                    slot_reads=self._slot_reads,
                    staging=self._staging,
                    caches=self._caches,
                    tail_zeroing=self._tail_zeroing,
                    groups=self._engine.groups,
                    boot=boot,
                    worker=self._index,
                )
            )
            self._thread = thread
        return self._thread

    def _as_consumer(self, caches: KvCaches) -> WorkerDescription:
        """This worker's description as a consumer: with the addresses of the caches themselves, not of the copy."""
        return msgspec.structs.replace(self.description, tensors=caches.tensors)

    def _rehearse(self, workers: Sequence[WorkerDescription]) -> None:
        """Prepare the first contact: plan a transfer from a producer of this engine's own shape.

        Where that fails the engine starts all the same: the first contact does it, or reports the reason.
        """
        try:
            if len(workers) <= _MOST_REHEARSED:
                with contextlib.suppress(PlanRefused, InvalidMessage):
                    self._plans.plan(msgspec.structs.replace(self._engine, workers=tuple(workers)))
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log("a first contact could not be prepared; the engine starts without")

    def _handshake(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        """Fetch a producer's description and plan the transfer; waits, so it runs on a thread of its own."""
        if key.engine_id == self._engine_id:
            raise HandshakeFailed("the params name this very engine")
        description = self._side_channel.fetch_description(
            key.host, key.port, key.engine_id, self._engine_id, self._settings.handshake_timeout_s
        )
        if description.engine_id != key.engine_id:
            raise PeerRefused(f"{key.host}:{key.port} is engine {description.engine_id}, not {key.engine_id}")
        if description.boot != key.boot:
            raise PeerRefused(f"engine {key.engine_id} has restarted since it wrote these params")
        with self._planning:
            return description, self._plans.plan(description)


def _staging(caches: KvCaches, settings: WorkerSettings) -> Staging | None:
    """The staging pool of the settings."""
    asked = settings.staging_pool_bytes
    capacity = _STAGING_BYTES.get(caches.device.type, _STAGING_BYTES_OF_OTHERS) if asked is None else asked
    if settings.host_buffer and not capacity:
        raise InvalidConfig("staging_pool_bytes", 0, "more than 0 with a host buffer: everything goes through the pool")
    return Staging(caches, capacity, on_host=settings.host_buffer) if capacity else None
