"""Integrity of a worker: everything that was taken belongs to a live owner. And a transfer thread that stands still.

The thread is looked at between two of its turns (`FerryWorker.snapshot`).

| of | taken | by |
| --- | --- | --- |
| the entries for slot reads | all that are not free | loads that run or are quarantined, polls, first reads |
| the pages for block ids | all that are not free | loads that run or are quarantined |
| the staging pool | waves that are out | staged reads of these loads, quarantined ones by quarantined loads |
| the fabric's transfers | not released | these loads, polls (`slot_watch`), first reads |
| its prepared lists | not released | the slot reads, the pages, peers |
| its peers | not removed | peers |
| the lease table | words that are not empty | leases |
| the rows | headers that are not empty | leases |
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.slots import (
    SlotState,
    header_word,
    slot_word,
)
from kvferry.worker.fabric.port import LocalDescriptors, RemoteDescriptors, Transfer
from kvferry.worker.leases import LeaseTableSnapshot
from kvferry.worker.loads.state import LoadState
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.staging.pool import WAVES_PER_LOAD, PoolSnapshot
from kvferry.worker.thread_snapshot import Holder, ThreadSnapshot
from kvferry.worker.worker import FerryWorker
from tests.harness.inside import thread_of

ANSWER_WITHIN_S = 30.0
STANDS_WITHIN_S = 60.0
LISTS_OF_THE_WORKER = 2
"""Prepared lists that are no peer's: the entries for slot reads, and the pages for block ids."""


def snapshot_of(worker: FerryWorker) -> ThreadSnapshot:
    """The worker's transfer thread between two of its turns; it must run."""
    seen = worker.snapshot(ANSWER_WITHIN_S)
    assert seen is not None, "the transfer thread has ended"
    return seen


def check_worker(worker: FerryWorker, *, idle: bool = False) -> None:
    """Check the integrity of a worker between two turns of its transfer thread; waits. One that has ended has none.

    Args:
        idle: also check that nothing is under way: no load, no first read, no quarantined load. Peers may be known and
            leases held.

    Raises:
        LocalProtocolError: with all the sums, or the thread does not answer.
    """
    try:
        seen = worker.snapshot(ANSWER_WITHIN_S)
    except TimeoutError:
        raise LocalProtocolError(
            f"the transfer thread has not answered within {ANSWER_WITHIN_S:g} s"
        ) from None
    if seen is None:
        return
    wrong = worker_errors(seen)
    if idle:
        waiting = seen.loads[LoadState.WAITING]
        left = {
            "loads wait": waiting,
            "loads run or are quarantined": sum(seen.loads.values()) - waiting,
            "first reads have not ended": seen.first_reads,
            "handles were not taken back": len(seen.refused),
            "transfers are open": seen.handles.transfers,
            "peers are leaving": seen.handles.leaving,
        }
        wrong += [f"{count} {what}" for what, count in left.items() if count]
    if wrong:
        raise LocalProtocolError(f"{'; '.join(wrong)}. {worker_sums(seen)}")


def check_every_turn(worker: FerryWorker) -> list[str]:
    """Check the integrity of a worker in every turn of its transfer thread from now on.

    Returns:
        A list that gets what is wrong, each error once.
    """
    found: list[str] = []
    thread = thread_of(worker)
    step = thread.registry.step

    def checked(now_s: float, in_use: Collection[PeerKey]) -> bool:
        found.extend(
            error
            for error in worker_errors(thread.snapshot_now())
            if error not in found
        )
        return step(now_s, in_use)

    thread.registry.step = checked  # type: ignore[method-assign]
    return found


def worker_errors(seen: ThreadSnapshot) -> list[str]:
    """The sums of a worker that are wrong."""
    wrong = [*_wrong_entries(seen), *_wrong_handles(seen), *table_errors(seen.leases)]
    if seen.pool is not None:
        wrong += [*pool_errors(seen.pool), *_wrong_waves(seen, seen.pool)]
    return wrong


def worker_sums(seen: ThreadSnapshot) -> str:
    """All the sums of a worker in a line."""
    loads = ", ".join(f"{count} {state.value}" for state, count in seen.loads.items())
    of_loads = [holder for holder in seen.holders if holder.state is not None]
    others = [holder for holder in seen.holders if holder.state is None]
    pool = "none"
    if seen.pool is not None:
        pool = f"{seen.pool.capacity} = {seen.pool.free_bytes} free + {seen.pool.waves}"
    return (
        f"loads: {loads}; peers: {len(seen.peers.ready)} ready, {seen.peers.retired} retired; "
        f"entries: {seen.entries.count} = {len(seen.entries.free)} free + {_entries(of_loads)} of loads + "
        f"{_entries(others)} of polls and first reads; transfers: {_transfers(of_loads)} of loads, "
        f"{_transfers(others)} of polls and first reads; not taken back: {len(seen.refused)}; "
        f"the fabric has {seen.handles}; pool: {pool}; "
        f"leases: {len(seen.leases.words)} words, {len(seen.leases.leases)} leases, {len(seen.leases.held)} held, "
        f"{seen.leases.pending} pending"
    )


def pool_errors(pool: PoolSnapshot) -> list[str]:
    """What is wrong with the waves that are out and the loads that wait."""
    wrong: list[str] = []
    edges = [0]
    for wave in pool.waves:
        edges += [wave.start, wave.stop]
        if (wave.start | wave.stop) % pool.alignment:
            wrong.append(f"{wave} is not aligned")
        if wave.num_bytes > pool.largest_wave:
            wrong.append(f"{wave} is larger than {pool.largest_wave}")
    edges.append(pool.capacity)
    if edges != sorted(edges):
        wrong.append(f"waves overlap or leave the pool: {edges}")
    if pool.used_bytes != sum(wave.num_bytes for wave in pool.waves):
        wrong.append(
            f"{pool.used_bytes} bytes of the pool are counted as used: {pool.waves}"
        )
    by_peer = Counter[str]()
    for wave in pool.waves:
        by_peer[wave.peer] += wave.num_bytes
    wrong += [
        f"peer={peer} holds {num_bytes} of at most {pool.peer_limit}"
        for peer, num_bytes in by_peer.items()
        if num_bytes > pool.peer_limit
    ]
    live = Counter(
        wave.load for wave in pool.waves if wave.start not in pool.quarantined
    )
    wrong += [
        f"load={load} holds {count} waves"
        for load, count in live.items()
        if count > WAVES_PER_LOAD
    ]
    wrong += [
        f"load={load} waits and holds a wave" for load in pool.waiting if load in live
    ]
    not_out = pool.quarantined - {wave.start for wave in pool.waves}
    if not_out:
        wrong.append(f"quarantined but not out: {sorted(not_out)}")
    return wrong


def table_errors(table: LeaseTableSnapshot) -> list[str]:
    """What is wrong with a lease table: every lease that can be read has its word, every other word is empty, only
    leases with a request are held, and every row is a lease's."""
    wrong = [
        f"the word of slot {slot} is {table.words.get(slot, 0):#x} under epoch {lease.epoch:#x}"
        for slot, lease in table.leases.items()
        if table.words.get(slot, 0)
        not in (
            slot_word(lease.epoch, state)
            for state in (SlotState.COMPUTING, SlotState.READY)
        )
    ]
    if len(table.words) != len(table.leases):
        wrong.append(
            f"{len(table.words)} words are not empty, and there are {len(table.leases)} leases"
        )
    held = {slot for slot, lease in table.leases.items() if lease.is_held}
    if held != table.held:
        wrong.append(
            f"slots {sorted(held ^ table.held)} are held by no request, or the other way round"
        )
    known = {
        (lease.row, header_word(lease.origin), header_word(lease.epoch))
        for lease in table.leases.values()
    }
    wrong += [
        f"row {row} has the header {origin:#x}, {present:#x} of no lease"
        for row, (origin, present) in table.headers.items()
        if (row, origin, present) not in known
    ]
    return wrong


@contextlib.contextmanager
def standing_still(worker: FerryWorker) -> Iterator[None]:
    """The worker's transfer thread stands still in the middle of a turn, until the block ends."""
    stands, goes_on = threading.Event(), threading.Event()
    registry = thread_of(worker).registry
    step = registry.step

    def stand_still(*args: Any) -> bool:
        stands.set()
        goes_on.wait(STANDS_WITHIN_S)
        return step(*args)

    with mock.patch.object(registry, "step", stand_still):
        thread_of(worker).wake()
        assert stands.wait(STANDS_WITHIN_S)
        try:
            yield
        finally:
            goes_on.set()


def _entries(holders: list[Holder]) -> int:
    return sum(len(holder.entries) for holder in holders)


def _transfers(holders: list[Holder]) -> int:
    return sum(holder.transfers for holder in holders)


def _wrong_entries(seen: ThreadSnapshot) -> Iterator[str]:
    taken = Counter(entry for holder in seen.holders for entry in holder.entries)
    for entry, count in taken.items():
        if count > 1:
            yield f"entry {entry} has {count} owners"
    for entry in taken.keys() & set(seen.entries.free):
        yield f"entry {entry} is free and taken"
    free = len(seen.entries.free)
    if free + taken.total() != seen.entries.count:
        yield f"{seen.entries.count} entries are not {free} free + {taken.total()} taken"
    pages = sum(len(holder.pages) for holder in seen.holders)
    free = len(seen.pages.free)
    if free + pages != seen.pages.count:
        yield f"{seen.pages.count} pages are not {free} free + {pages} taken"


def _wrong_handles(seen: ThreadSnapshot) -> Iterator[str]:
    # Handles that the fabric has not taken back yet are still open, but have no other owner.
    refused_transfers = sum(isinstance(handle, Transfer) for handle in seen.refused)
    refused_lists = sum(
        isinstance(handle, LocalDescriptors | RemoteDescriptors)
        for handle in seen.refused
    )
    refused_agents = sum(isinstance(handle, str) for handle in seen.refused)
    transfers = _transfers(list(seen.holders))
    sums = (
        ("transfers", seen.handles.transfers, transfers + refused_transfers),
        (
            "prepared",
            seen.handles.prepared,
            LISTS_OF_THE_WORKER + seen.lists + refused_lists,
        ),
        ("peers", seen.handles.peers, seen.agents + refused_agents),
    )
    for name, count, known in sums:
        if count != known:
            yield f"the fabric has {count} {name}, {known} are known"


def _wrong_waves(seen: ThreadSnapshot, pool: PoolSnapshot) -> Iterator[str]:
    owned = Counter(wave for holder in seen.holders for wave in holder.waves)
    if owned != Counter(pool.waves):
        yield f"the pool gave out {pool.waves}, loads have {list(owned)}"
    quarantined_bytes = sum(
        wave.num_bytes
        for holder in seen.holders
        if holder.state is LoadState.QUARANTINED
        for wave in holder.waves
    )
    if quarantined_bytes != pool.quarantined_bytes:
        yield (
            f"{pool.quarantined_bytes} B of the pool are quarantined, {quarantined_bytes} B of quarantined loads"
        )
    unknown = set(pool.waiting) - {holder.request_id for holder in seen.holders}
    if unknown:
        yield f"loads that wait for the pool do not run: {sorted(unknown)}"
