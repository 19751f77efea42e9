"""A producer engine that this worker can read from: its agents, the plan and the prepared descriptors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.plan.descriptors import DescriptorTable, route_tables
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.plan.waves import source_table
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.ids import SLOT_BYTES
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.side_channel.hosts import host_port
from kvferry.protocol.stream_rows import ID_BYTES, PAGE_IDS, ROW_HEADER_BYTES, StreamRows
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    LocalDescriptors,
    MemoryKind,
    PeerAgent,
    RemoteDescriptors,
)
from kvferry.worker.fabric.reads import FabricReader, Handle
from kvferry.worker.staging.buffer import PreparedSource, Staging


class PeerKey(NamedTuple):
    """One boot of one engine at one address."""

    host: str
    port: int
    engine_id: str
    boot: str

    @classmethod
    def of(cls, source: RemotePrefill) -> PeerKey:
        """The producer that params name."""
        return cls(source.remote_host, source.remote_port, source.engine_id, source.kvferry.boot)

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
        headers: descriptor `i` is the header of row `i`.
        pages: descriptor `row * rows.pages + i` is page `i` of the ids of a row.
    """

    rows: StreamRows
    headers: RemoteDescriptors
    pages: RemoteDescriptors


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """One producer worker, ready to be read from.

    Attributes:
        slots: its lease table; descriptor `i` is slot `i`.
        tables: the reads in place from this worker.
        sources: the reads through the staging pool.
        rows: its rows; None if its prompts can only be read when they are complete.
    """

    route: Route
    agent: PeerAgent
    slots: RemoteDescriptors
    tables: tuple[PreparedTable, ...]
    sources: tuple[PreparedSource, ...]
    rows: PreparedRows | None = None


@dataclass(slots=True)
class ReadQueue:
    """The data reads of one peer. They share its link, where the first that was posted may well end first.

    So a read progresses while those end that were posted before it. Those after it do not count: if a read were lost,
    a busy peer would keep its load waiting.

    Attributes:
        under_way: loads that read data from it now.
        ended: those that have ended, well or badly.
    """

    under_way: int = 0
    ended: int = 0

    @property
    def turn(self) -> int:
        """What `ended` will be at least when all that is under way now has ended."""
        return self.ended + self.under_way

    @contextlib.contextmanager
    def queued(self) -> Iterator[int]:
        """Read data. Yields the turn: what `ended` is when those before have ended."""
        turn = self.turn
        self.under_way += 1
        try:
            yield turn
        finally:
            self.under_way -= 1
            self.ended += 1


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A producer engine, ready to be read from.

    Attributes:
        made: the handles to give back, in the order of creation.
        data_reads: of all loads from it.
    """

    key: PeerKey
    description: EngineDescription
    plan: TransferPlan
    routes: tuple[PeerRoute, ...]
    made: tuple[Handle, ...]
    data_reads: ReadQueue = field(default_factory=ReadQueue)


def connect(
    reader: FabricReader,
    caches: KvCaches,
    staging: Staging | None,
    key: PeerKey,
    description: EngineDescription,
    plan: TransferPlan,
) -> Peer:
    """Make a planned producer known to the fabric and prepare its descriptors.

    Args:
        staging: the pool; None where the plan stages nothing.

    Raises:
        FabricError: the fabric refuses its metadata or its memory; nothing is left behind.
        InvalidMessage: the description names memory of no known kind.
    """
    made: list[Handle] = []
    try:
        routes = tuple(
            _connect_route(reader.fabric, caches, staging, route, description, made)
            for route in plan.routes
        )
    except Exception:
        for one in reversed(made):
            reader.give_back(one)
        raise
    return Peer(key, description, plan, routes, tuple(made))


def disconnect(reader: FabricReader, peer: Peer) -> None:
    """Give back everything that `connect` made; raises nothing. Reads in flight go on and must still be polled."""
    for one in reversed(peer.made):
        reader.give_back(one)


def _connect_route(
    fabric: Fabric,
    caches: KvCaches,
    staging: Staging | None,
    route: Route,
    description: EngineDescription,
    made: list[Handle],
) -> PeerRoute:
    worker = description.workers[route.worker]
    agent = fabric.add_peer(worker.agent_metadata)
    made.append(agent)
    lease_table = worker.lease_table
    row = (lease_table.address, SLOT_BYTES, 0, SLOT_BYTES, lease_table.slots)
    slots = fabric.prepare_remote(agent, DescriptorRows.from_tuples(MemoryKind.DRAM, [row]))
    made.append(slots)
    try:
        remote_kind = MemoryKind(worker.memory)
    except ValueError:
        raise InvalidMessage("workers.memory", worker.memory, "DRAM or VRAM") from None
    tables = []
    placing = Placing.DIRECT if staging is not None else None
    for table in route_tables(route, caches.device_index, worker.device, placing):
        local = fabric.prepare_local(DescriptorRows(caches.kind, table.local_rows))
        made.append(local)
        remote = fabric.prepare_remote(agent, DescriptorRows(remote_kind, table.remote_rows))
        made.append(remote)
        tables.append(PreparedTable(table, local, remote))
    sources = []
    if staging is not None:
        for source in route.sources:
            rows = source_table(source, worker.device)
            chunks = staging.prepare(fabric, rows.run_bytes)
            made.append(chunks)
            remote = fabric.prepare_remote(agent, DescriptorRows(remote_kind, rows.rows))
            made.append(remote)
            sources.append(PreparedSource.at_address(staging.address, rows, chunks, remote))
    stream_rows = worker.stream_rows
    prepared_rows = (
        _prepare_rows(fabric, agent, stream_rows, made) if stream_rows is not None else None
    )
    return PeerRoute(route, agent, slots, tuple(tables), tuple(sources), prepared_rows)


def _prepare_rows(
    fabric: Fabric, agent: PeerAgent, rows: StreamRows, made: list[Handle]
) -> PreparedRows:
    prepared = []
    for address, length, count in (
        (rows.headers, ROW_HEADER_BYTES, rows.rows),
        (rows.ids, PAGE_IDS * ID_BYTES, rows.rows * rows.pages),
    ):
        row = (address, length, 0, length, count)
        prepared.append(
            fabric.prepare_remote(agent, DescriptorRows.from_tuples(MemoryKind.DRAM, [row]))
        )
        made.append(prepared[-1])
    return PreparedRows(rows, *prepared)


Handshake = Callable[[PeerKey], tuple[EngineDescription, TransferPlan]]
"""Fetches a peer's description and plans it; waits, so it runs on a thread of its own. Raises KvferryError."""
