"""A producer engine that this worker can read from: its agents, the plan and the prepared descriptors.

Connecting ends with first reads: a small real read from every worker of the peer, because nothing else in NIXL shows a
connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvferry.plan.descriptors import DescriptorTable, route_tables
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.plan.waves import source_table
from kvferry.protocol.errors import HandshakeFailed, InvalidMessage
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.ids import SLOT_BYTES
from kvferry.protocol.params import RemotePrefill
from kvferry.worker.caches import KvCaches
from kvferry.worker.fabric.port import (
    DescriptorRows,
    Fabric,
    LocalDescriptors,
    MemoryKind,
    PeerAgent,
    RemoteDescriptors,
    Transfer,
    TransferState,
)
from kvferry.worker.fabric.reads import Handle, Reader, Reads, SlotReads
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
        return f"{self.engine_id}@{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A table of descriptors and both sides as the fabric prepared them."""

    table: DescriptorTable
    local: LocalDescriptors
    remote: RemoteDescriptors


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """One producer worker, ready to be read from.

    Attributes:
        slots: its lease table; descriptor `i` is slot `i`.
        tables: the reads in place from this worker.
        sources: the reads through the staging pool.
    """

    route: Route
    agent: PeerAgent
    slots: RemoteDescriptors
    tables: tuple[PreparedTable, ...]
    sources: tuple[PreparedSource, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A producer engine, ready to be read from. `made` lists the handles to give back, in the order of creation."""

    key: PeerKey
    description: EngineDescription
    plan: TransferPlan
    routes: tuple[PeerRoute, ...]
    made: tuple[Handle, ...]


def connect(
    reader: Reader,
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
            _connect_route(reader.fabric, caches, staging, route, description, made) for route in plan.routes
        )
    except Exception:
        for one in reversed(made):
            reader.give_back(one)
        raise
    return Peer(key, description, plan, routes, tuple(made))


def disconnect(reader: Reader, peer: Peer) -> None:
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
    slots = fabric.prepare_remote(agent, DescriptorRows.of(MemoryKind.DRAM, [row]))
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
            sources.append(PreparedSource.of(rows, chunks, remote, staging.address))
    return PeerRoute(route, agent, slots, tuple(tables), tuple(sources))


Handshake = Callable[[PeerKey], tuple[EngineDescription, TransferPlan]]
"""Fetches a peer's description and plans it; waits, so it runs on a thread of its own. Raises KvferryError."""


@dataclass(slots=True, eq=False)
class FirstRead:
    """The first read of one peer.

    Attributes:
        reads: reads that may still write `entries`.
        asked_s: when the peer was first asked for.
        arrived_s: when its description and plan arrived.
        prepared_s: how long the fabric took to prepare it.
        transfers: the reads that were posted.
    """

    peer: Peer
    reads: Reads
    entries: tuple[int, ...]
    asked_s: float
    arrived_s: float
    prepared_s: float
    transfers: list[Transfer] = field(default_factory=list)


class FirstReads:
    """The first reads of a worker. Used on the transfer thread.

    Args:
        timeout_s: for one of them.
    """

    def __init__(
        self, reader: Reader, caches: KvCaches, staging: Staging | None, slot_reads: SlotReads, timeout_s: float
    ) -> None:
        self.reader = reader
        self.timeout_s = timeout_s
        self._caches = caches
        self._staging = staging
        self._slot_reads = slot_reads
        self._under_way: dict[PeerKey, FirstRead] = {}
        self._given_up: list[FirstRead] = []

    def __len__(self) -> int:
        """Number of those under way."""
        return len(self._under_way)

    def __contains__(self, key: PeerKey) -> bool:
        return key in self._under_way

    def all(self) -> list[FirstRead]:
        """Those under way, and those that were given up and may still write."""
        return [*self._under_way.values(), *self._given_up]

    def given_up(self) -> int:
        """Number of those that were given up and may still write."""
        return len(self._given_up)

    def has_room(self) -> bool:
        """Whether half of the entries are free."""
        return 2 * self._slot_reads.free() >= len(self._slot_reads.words)

    def begin(
        self, key: PeerKey, description: EngineDescription, plan: TransferPlan, asked_s: float, now_s: float
    ) -> None:
        """Make a planned peer known to the fabric and post its first read.

        Raises:
            HandshakeFailed: there are too few entries.
            FabricError, InvalidMessage: as `connect` and `Fabric.post_read`.
        """
        entries = self._slot_reads.try_take(len(plan.routes))
        if entries is None:
            raise HandshakeFailed("too many reads in flight")
        began_s = time.perf_counter()
        try:
            peer = connect(self.reader, self._caches, self._staging, key, description, plan)
        except Exception:
            self._slot_reads.give_back(entries)
            raise
        first = FirstRead(peer, self.reader.reads(), entries, asked_s, now_s, time.perf_counter() - began_s)
        try:
            for entry, route in zip(entries, peer.routes, strict=True):
                where, slot = np.array([entry], dtype=np.int32), np.zeros(1, dtype=np.int32)
                first.transfers.append(first.reads.post(self._slot_reads.descriptors, where, route.slots, slot))
        except Exception:
            self._give_up(first)
            raise
        self._under_way[key] = first

    def step(self, now_s: float) -> list[tuple[FirstRead, Exception | None]]:
        """Those that have ended, each with its error, or None for a peer that is connected."""
        ended: list[tuple[FirstRead, Exception | None]] = []
        for first in list(self._under_way.values()):
            error: Exception | None = None
            try:
                if {self.reader.fabric.poll(read) for read in first.transfers} - {TransferState.DONE}:
                    if now_s < first.arrived_s + self.timeout_s:
                        continue
                    error = HandshakeFailed(f"the first read took longer than {self.timeout_s:g} s")
            except Exception as failed:  # noqa: BLE001 - handled by the caller
                error = failed
            del self._under_way[first.peer.key]
            if error is None:
                for read in first.transfers:
                    first.reads.finished(read)
                self._slot_reads.give_back(first.entries)
            else:
                self._give_up(first)
            ended.append((first, error))
        self._given_up = [first for first in self._given_up if not self._try_close(first)]
        return ended

    def _give_up(self, first: FirstRead) -> None:
        if not self._try_close(first):
            self._given_up.append(first)

    def _try_close(self, first: FirstRead) -> bool:
        """Give everything back if the first read can write no more. Returns whether it did."""
        if not first.reads.settle():
            return False
        self._slot_reads.give_back(first.entries)
        disconnect(self.reader, first.peer)
        return True
