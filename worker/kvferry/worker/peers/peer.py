"""A producer engine that this worker can read from: its agents, the plan and the prepared descriptors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.plan.descriptors import DescriptorTable, route_table
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.plan.waves import source_table
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import EngineDescription, LeaseTableAddress
from kvferry.protocol.hosts import ChannelAddress, host_port
from kvferry.protocol.slots import (
    ID_BYTES,
    PAGE_IDS,
    ROW_HEADER_BYTES,
    SLOT_BYTES,
    StreamRows,
)
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    LocalDescriptors,
    MemoryKind,
    PeerAgent,
    RemoteDescriptors,
)
from kvferry.worker.fabric.reads import (
    FabricReader,
    Handle,
    ReadQueue,
    RemoteEntries,
)
from kvferry.worker.peer_memory.mapping import WorkerMapping
from kvferry.worker.peer_memory.port import PROOF_BYTES, NotMappable, PeerMemory
from kvferry.worker.peer_memory.this_process import ipc_namespace, machine_id
from kvferry.worker.peers.mapped_route import MappedRoute, Mapper
from kvferry.worker.staging.buffer import PreparedSource, Staging


class PeerKey(NamedTuple):
    """One boot of one engine at one address."""

    host: str
    port: int
    engine_id: str
    boot: str

    @property
    def address(self) -> ChannelAddress:
        return self.host, self.port

    def __str__(self) -> str:
        return f"{self.engine_id}@{host_port(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A table of descriptors and both sides as the fabric prepared them."""

    table: DescriptorTable
    local: LocalDescriptors
    remote: RemoteDescriptors


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """A worker's rows of prompts that are being computed.

    Attributes:
        headers: entry `i` is the header of row `i`: uint64 `[2]`.
        pages: entry `row * rows.pages + i` is page `i` of the ids of a row: uint32 `[PAGE_IDS]`.
    """

    rows: StreamRows
    headers: RemoteEntries
    pages: RemoteEntries


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """One producer worker, ready to be read from.

    Attributes:
        slots: its lease table; entry `i` is slot `i`: uint64 `[2]`.
        table: the reads in place from this worker; None if there are none.
        sources: the reads through the staging pool.
        rows: its rows; None if its prompts can only be read when they are complete.
        mapped: the reads from its mapped memory, which are then all there are; None if it is not mapped.
    """

    route: Route
    agent: PeerAgent
    slots: RemoteEntries
    table: PreparedTable | None
    sources: tuple[PreparedSource, ...]
    rows: PreparedRows | None = None
    mapped: MappedRoute | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A producer engine, ready to be read from.

    Attributes:
        made: the handles to give back, in the order of creation.
        why_not_mapped: why a worker's memory is not mapped; None if all of it is.
        why_slow: why reads from a worker on this host are slow, and what helps; None if they need not be.
        data_reads: of all loads from it.
        slots: the lease table of each route.
        sources: what is read through the staging pool, of all routes.
        mapped_routes: the producer workers whose memory is mapped.
    """

    key: PeerKey
    description: EngineDescription
    plan: TransferPlan
    routes: tuple[PeerRoute, ...]
    made: tuple[Handle, ...]
    why_not_mapped: str | None = None
    why_slow: str | None = None
    data_reads: ReadQueue = field(default_factory=ReadQueue)
    slots: tuple[RemoteEntries, ...] = field(init=False)
    sources: tuple[PreparedSource, ...] = field(init=False)
    mapped_routes: tuple[MappedRoute, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Once for the peer: each of its loads asks for all three.
        sources: list[PreparedSource] = []
        mapped_routes: list[MappedRoute] = []
        for route in self.routes:
            sources += route.sources
            if route.mapped is not None:
                mapped_routes.append(route.mapped)
        slots = tuple(route.slots for route in self.routes)
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "sources", tuple(sources))
        object.__setattr__(self, "mapped_routes", tuple(mapped_routes))

    def has_exited(self) -> bool:
        """Whether the process of a mapped worker has ended. Of the others NIXL tells, at the next read."""
        return any(route.mapping.has_exited() for route in self.mapped_routes)

    def may_be_freed(self) -> bool:
        """Whether the memory of a mapped worker may be another's by now. See `OpenedMemory`."""
        return any(route.mapping.may_be_freed() for route in self.mapped_routes)


def connect(
    reader: FabricReader,
    caches: KvCaches,
    staging: Staging | None,
    key: PeerKey,
    description: EngineDescription,
    plan: TransferPlan,
    mapper: Mapper | None,
) -> Peer:
    """Make a planned producer known to the fabric and prepare its descriptors.

    Args:
        staging: the pool; None where the plan stages nothing.
        mapper: maps the memory of its workers, where that is possible; None to read everything over the fabric.

    Raises:
        FabricError: the fabric refuses its metadata or its memory; nothing is left behind.
        PlanRefused: what is planned can only be read from mapped memory, and is not mapped.
        InvalidMessage: the description names memory of no known kind.
    """
    mappings: dict[int, WorkerMapping] = {}
    why_not_mapped: str | None = "mapped_reads is off"
    if mapper is not None:
        mappings, why_not_mapped = _map_workers(mapper.peer_memory, description, plan)
    plan = plan.with_mapped(mappings)
    connecting = _Connecting(reader.fabric, caches, staging, mapper, mappings)
    try:
        routes = tuple(
            connecting.connect_route(route, description) for route in plan.routes
        )
    except Exception:
        _give_back(reader, connecting.made)
        raise
    why_slow = _why_slow(reader.fabric, caches, description, plan, mappings)
    return Peer(
        key, description, plan, routes, tuple(connecting.made), why_not_mapped, why_slow
    )


def disconnect(reader: FabricReader, peer: Peer) -> None:
    """Give back everything that `connect` made; raises nothing. Reads in flight go on and must still be polled.

    What is mapped is unmapped with the last load that reads through it.
    """
    _give_back(reader, peer.made)
    for route in peer.mapped_routes:
        route.mapping.close()


def _map_workers(
    peer_memory: PeerMemory, description: EngineDescription, plan: TransferPlan
) -> tuple[dict[int, WorkerMapping], str | None]:
    """The memory of the workers of a plan, by worker, and why one of them is not mapped."""
    mappings: dict[int, WorkerMapping] = {}
    why_not: str | None = None
    for route in plan.routes:
        try:
            worker = description.workers[route.worker]
            mappings[route.worker] = WorkerMapping(peer_memory, worker)
        except NotMappable as not_mappable:
            why_not = str(not_mappable)
    return mappings, why_not


def _why_slow(
    fabric: Fabric,
    caches: KvCaches,
    description: EngineDescription,
    plan: TransferPlan,
    mappings: Mapping[int, WorkerMapping],
) -> str | None:
    """Why reads from a worker on this host that is not mapped are slow; None if there is none, or they are not."""
    for route in plan.routes:
        shared = description.workers[route.worker].shared
        if route.worker in mappings or shared is None or shared.machine != machine_id():
            continue
        # What one of the two does not know is taken for the same: only what is known is warned of.
        known = {shared.ipc_namespace, ipc_namespace()} - {None}
        why_slow = fabric.slow_within_host(caches.kind, shares_ipc=len(known) < 2)
        if why_slow is not None:
            return why_slow
    return None


def _give_back(reader: FabricReader, made: Sequence[Handle]) -> None:
    # Prepared lists before the agent that they belong to.
    for handle in reversed(made):
        reader.give_back(handle)


class _Connecting:
    """The routes of one peer while they are prepared.

    Attributes:
        made: what the fabric has given out so far, to be given back if the rest fails.
    """

    def __init__(
        self,
        fabric: Fabric,
        caches: KvCaches,
        staging: Staging | None,
        mapper: Mapper | None,
        mappings: Mapping[int, WorkerMapping],
    ) -> None:
        self.made: list[Handle] = []
        self._mapper = mapper
        self._mappings = mappings
        self._fabric = fabric
        self._caches = caches
        self._staging = staging

    def connect_route(self, route: Route, description: EngineDescription) -> PeerRoute:
        worker = description.workers[route.worker]
        agent = self._fabric.add_peer(worker.agent_metadata)
        self.made.append(agent)
        mapping = self._mappings.get(route.worker)
        slots = self._slots(agent, worker.lease_table, mapping)
        try:
            kind = MemoryKind(worker.memory)
        except ValueError:
            raise InvalidMessage(
                "workers.memory", worker.memory, "DRAM or VRAM"
            ) from None
        table: PreparedTable | None = None
        sources: tuple[PreparedSource, ...] = ()
        mapped = None
        if mapping is None or self._mapper is None:
            table = self._table(route, agent, worker.device, kind)
            sources = self._sources(route, agent, worker.device, kind)
        else:
            # Nothing is prepared of caches that NIXL does not read.
            mapped = self._mapped(route, agent, mapping, self._mapper)
        rows = None
        if worker.stream_rows is not None:
            rows = self._rows(agent, worker.stream_rows, mapping)
        return PeerRoute(route, agent, slots, table, sources, rows, mapped)

    def _table(
        self, route: Route, agent: PeerAgent, device: int, kind: MemoryKind
    ) -> PreparedTable | None:
        """What is read in place; without a pool, everything."""
        placing = None
        if self._staging is not None:
            placing = Placing.DIRECT
        table = route_table(route, self._caches.device_index, device, placing)
        if table is None:
            return None
        local = self._local(DescriptorRows(self._caches.kind, table.local_rows))
        remote = self._remote(agent, DescriptorRows(kind, table.remote_rows))
        return PreparedTable(table, local, remote)

    def _sources(
        self, route: Route, agent: PeerAgent, device: int, kind: MemoryKind
    ) -> tuple[PreparedSource, ...]:
        """What is read through the pool."""
        if self._staging is None:
            return ()
        sources: list[PreparedSource] = []
        for source in route.sources:
            table = source_table(source, device)
            chunks = self._staging.prepare(self._fabric, table.run_bytes)
            self.made.append(chunks)
            remote = self._remote(agent, DescriptorRows(kind, table.rows))
            sources.append(
                PreparedSource.at_address(self._staging.address, table, chunks, remote)
            )
        return tuple(sources)

    def _mapped(
        self, route: Route, agent: PeerAgent, mapping: WorkerMapping, mapper: Mapper
    ) -> MappedRoute:
        """What is read from mapped memory."""
        rows = [
            (address, PROOF_BYTES, 0, PROOF_BYTES, 1)
            for address in mapping.proof_addresses()
        ]
        proofs = self._remote(agent, DescriptorRows.from_tuples(MemoryKind.DRAM, rows))
        relayout = mapper.relayout_from(mapping.allocations)
        return MappedRoute.from_plan(route, mapping, proofs, self._caches, relayout)

    def _slots(
        self, agent: PeerAgent, table: LeaseTableAddress, mapping: WorkerMapping | None
    ) -> RemoteEntries:
        descriptors = self._remote_array(agent, table.address, SLOT_BYTES, table.slots)
        if mapping is None:
            return RemoteEntries(descriptors, None)
        return RemoteEntries(descriptors, mapping.slots)

    def _rows(
        self, agent: PeerAgent, rows: StreamRows, mapping: WorkerMapping | None
    ) -> PreparedRows:
        page_bytes = PAGE_IDS * ID_BYTES
        headers = self._remote_array(agent, rows.headers, ROW_HEADER_BYTES, rows.rows)
        pages = self._remote_array(agent, rows.ids, page_bytes, rows.rows * rows.pages)
        if mapping is None:
            return PreparedRows(
                rows, RemoteEntries(headers, None), RemoteEntries(pages, None)
            )
        return PreparedRows(
            rows,
            headers=RemoteEntries(headers, mapping.row_headers),
            pages=RemoteEntries(pages, mapping.row_pages),
        )

    def _remote_array(
        self, agent: PeerAgent, address: int, num_bytes: int, count: int
    ) -> RemoteDescriptors:
        """`count` adjacent descriptors of `num_bytes` in the peer's host memory."""
        row = (address, num_bytes, 0, num_bytes, count)
        return self._remote(agent, DescriptorRows.from_tuples(MemoryKind.DRAM, [row]))

    def _local(self, rows: DescriptorRows) -> LocalDescriptors:
        prepared = self._fabric.prepare_local(rows)
        self.made.append(prepared)
        return prepared

    def _remote(self, agent: PeerAgent, rows: DescriptorRows) -> RemoteDescriptors:
        prepared = self._fabric.prepare_remote(agent, rows)
        self.made.append(prepared)
        return prepared
