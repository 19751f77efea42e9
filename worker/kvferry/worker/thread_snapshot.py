"""The state of a transfer thread between two of its turns, for tests and debugging.

What a load, a poll of slots or a first read has taken it must give back, so a snapshot lists both: what is taken of
each store (entries, pages, the pool, the fabric's handles), and who holds it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.worker.fabric.port import OpenHandles
from kvferry.worker.fabric.reads import EntriesSnapshot, FabricReader, Handle
from kvferry.worker.leases import LeaseTableSnapshot
from kvferry.worker.loads.results import LoadRecord, ResultBox, StepResults
from kvferry.worker.loads.runner import LoadRunner
from kvferry.worker.loads.state import LoadState
from kvferry.worker.peers.registry import PeerRegistry, PeerRegistrySnapshot
from kvferry.worker.staging.pool import PoolSnapshot, Wave
from kvferry.worker.worker_memory import WorkerMemory


@dataclass(frozen=True, slots=True)
class Holder:
    """What a load that has begun, a poll of slots or a first read has taken and must give back.

    Attributes:
        request_id, state: of a load; None of the others.
        entries, pages: for its reads of slots, and of block ids.
        transfers: number of its reads that the fabric has not taken back.
    """

    request_id: str | None
    state: LoadState | None
    entries: tuple[int, ...]
    pages: tuple[int, ...]
    waves: tuple[Wave, ...]
    transfers: int


@dataclass(frozen=True, slots=True)
class ThreadSnapshot:
    """The state of a transfer thread between two of its turns.

    Attributes:
        is_idle: nothing is left to do but what is due at long intervals.
        loads: by state the number of loads that are not over.
        begun: the records so far of those that have begun.
        untaken: what the next report to the engine has.
        peers: the producers that are known.
        leases: those that have not ended.
        holders: loads that have begun, polls of slots, first reads, each with what it has taken.
        first_reads: first contacts whose reads have not ended.
        agents, lists: of peers, numbers of those that the fabric was given and has not taken back.
        entries, pages: the memory for reads of slots, and of block ids.
        pool: the staging pool; None without one.
        refused: handles that the fabric has not taken back yet.
        handles: that the fabric has.
    """

    is_idle: bool
    loads: dict[LoadState, int]
    begun: tuple[LoadRecord, ...]
    untaken: StepResults
    peers: PeerRegistrySnapshot
    leases: LeaseTableSnapshot
    holders: tuple[Holder, ...]
    first_reads: int
    agents: int
    lists: int
    entries: EntriesSnapshot
    pages: EntriesSnapshot
    pool: PoolSnapshot | None
    refused: tuple[Handle, ...]
    handles: OpenHandles


def snapshot_of_thread(
    memory: WorkerMemory,
    reader: FabricReader,
    registry: PeerRegistry,
    runner: LoadRunner,
    results: ResultBox,
    *,
    is_idle: bool,
) -> ThreadSnapshot:
    """What these parts of a transfer thread have now; on that thread, between two of its turns."""
    peers = list(registry.peers())
    agents = sum(len(peer.routes) for peer in peers)
    pool = memory.pool
    return ThreadSnapshot(
        is_idle=is_idle,
        loads=runner.loads.counts(),
        begun=tuple(copy.copy(load.record) for load in runner.begun()),
        untaken=results.snapshot(),
        peers=registry.snapshot(),
        leases=memory.table.snapshot(),
        holders=tuple(_holders(runner, registry)),
        first_reads=len(registry.first_reads.all()),
        agents=agents,
        lists=sum(len(peer.made) for peer in peers) - agents,
        entries=memory.slot_reads.snapshot(),
        pages=memory.id_pages.snapshot(),
        pool=pool.snapshot() if pool is not None else None,
        refused=tuple(reader.refused),
        handles=reader.fabric.open_handles(),
    )


def _holders(runner: LoadRunner, registry: PeerRegistry) -> Iterator[Holder]:
    for load in runner.begun():
        yield Holder(
            request_id=load.order.request_id,
            state=load.state,
            entries=load.entries,
            pages=load.lease_reads.pages,
            waves=tuple(load.waves()),
            transfers=load.transfers(),
        )
    for poll in runner.polls():
        yield Holder(None, None, poll.entries, (), (), len(poll.reads))
    for read in registry.first_reads.all():
        yield Holder(None, None, read.entries, (), (), len(read.reads))
