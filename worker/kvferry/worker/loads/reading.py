"""How a load reads: the slot of its lease, which is its fence, and between two readings of it the data: into the
request's blocks, through the staging pool, or from the producer's mapped memory.

A `Load` has one `Reading`: of a whole prompt at once (`WholeRead`), or part by part while it is computed
(`streamed_read.py`). Either has its bytes read by `DataReads`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from kvferry.plan.blocks import RequestBlocks, UnitPairs, descriptor_pairs, pair_request
from kvferry.plan.tokens import TokenMap
from kvferry.plan.waves import SourceUnits, source_units
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.slots import SlotState, slot_word
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import PeerLost
from kvferry.worker.fabric.port import Transfer
from kvferry.worker.fabric.reads import (
    Address,
    EntryBuffer,
    EntryRead,
    FabricReader,
    IdPages,
    Reads,
    RemoteEntries,
    SlotReads,
    entries_needed,
)
from kvferry.worker.loads.results import LoadRecord, Stage
from kvferry.worker.loads.slot_watch import SlotWords, Steps, Wait
from kvferry.worker.loads.state import LoadFailed, Progress
from kvferry.worker.loads.tail_zeroing import TailZeroing
from kvferry.worker.peers.mapped_route import MappedRoute
from kvferry.worker.peers.peer import Peer, PeerRoute, PreparedRows
from kvferry.worker.peers.registry import PeerRegistry
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.wave_table import WaveTable
from kvferry.worker.staging.buffer import PreparedSource, Staging
from kvferry.worker.staging.pool import Wave
from kvferry.worker.staging.staged_reads import StagedReads


@dataclass(frozen=True, slots=True)
class LoadContext:
    """The parts of a worker that its loads share.

    Attributes:
        groups: this engine's cache groups.
        worker: this worker's index in its engine.
    """

    reader: FabricReader
    registry: PeerRegistry
    slot_reads: SlotReads
    id_pages: IdPages
    staging: Staging | None
    caches: KvCaches
    tail_zeroing: TailZeroing
    groups: tuple[CacheGroup, ...]
    worker: int


_PAGES_AT_ONCE = 8
"""Most pages that one read takes. The pages of the worker are shared by all its loads."""


@dataclass(slots=True, eq=False)
class LeaseReads:
    """Reads of what the producer's workers say of one lease: its slot and, of a prompt that is being computed, the
    header of its row and its block ids. Each read ends, and is given back, before the next one begins.

    Attributes:
        reads: the load's, which settles them.
        peer: the producer's address, for the fairness of entries and pages.
        entries: where slots and headers are read to; kept from one read to the next.
        pages: where ids are read to.
        waits_for: of which there are too few now.
    """

    reads: Reads
    slot_reads: SlotReads
    id_pages: IdPages
    peer: Address
    entries: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    waits_for: EntryBuffer | None = None

    def give_back(self) -> None:
        """Give the memory back. Call it when none of the load's reads can write any more."""
        self.slot_reads.give_back(self.entries, self.peer)
        self.id_pages.give_back(self.pages, self.peer)
        self.entries = ()
        self.pages = ()

    @property
    def queue_moves(self) -> int:
        """While it waits for entries or pages: grows when others give some back."""
        if self.waits_for is None:
            return 0
        return self.waits_for.given_back

    def words(
        self, sources: Sequence[RemoteEntries], index: int
    ) -> Generator[None, None, SlotWords]:
        """Read the two words of the same entry of each of these: a slot, or the header of a row.

        Raises:
            FabricError: a read failed.
        """
        # Where all are mapped, which is usual within a host, without an `EntryRead`: its arrays take ten times as long
        # as the two loads, twice in every load.
        mapped_words: list[tuple[int, int]] = []
        for source in sources:
            if source.mapped is not None:
                first, second = source.mapped[index].tolist()
                mapped_words.append((first, second))
        num_read = len(sources) - len(mapped_words)
        if not num_read:
            return tuple(mapped_words)
        if not self.entries:
            self.entries = yield from self._take(self.slot_reads, num_read)
        wanted = np.array([index], dtype=np.int32)
        read = EntryRead(sources, wanted, self.slot_reads, self.entries)
        yield from self._finish(read)
        words: list[tuple[int, int]] = []
        for state, progress in read.values()[0].tolist():
            words.append((state, progress))
        return tuple(words)

    def headers(
        self, peer_rows: Sequence[PreparedRows], row: int
    ) -> Generator[None, None, SlotWords]:
        """Read the two words of a row's header on every producer worker.

        Raises:
            FabricError: a read failed.
        """
        return (yield from self.words([rows.headers for rows in peer_rows], row))

    def ids(
        self, rows: PreparedRows, row: int, pages: Sequence[int]
    ) -> Generator[None, None, dict[int, np.ndarray]]:
        """Read pages of a row's ids: uint32 `[PAGE_IDS]` by page.

        Raises:
            FabricError: a read failed.
        """
        ids: dict[int, np.ndarray] = {}
        first_page = row * rows.rows.pages
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            part = pages[first : first + _PAGES_AT_ONCE]
            wanted = np.array([first_page + page for page in part], dtype=np.int32)
            # In `self.pages` before anything is posted: the read may fail, and they must not be lost.
            needed = entries_needed([rows.pages], len(part))
            self.pages = yield from self._take(self.id_pages, needed)
            read = EntryRead([rows.pages], wanted, self.id_pages, self.pages)
            yield from self._finish(read)
            ids.update(zip(part, read.values()[:, 0], strict=True))
            self.id_pages.give_back(self.pages, self.peer)
            self.pages = ()
        return ids

    def post_slot(self, route: PeerRoute, slot: int) -> None:
        """Read the slot on one producer worker, for nothing. Mapped ones are not read, nor is any before the first
        `words` or after `give_back`."""
        if self.entries and route.slots.mapped is None:
            wanted = np.array([slot], dtype=np.int32)
            EntryRead([route.slots], wanted, self.slot_reads, self.entries[:1]).post(
                self.reads
            )

    def _take(
        self, buffer: EntryBuffer, count: int
    ) -> Generator[None, None, tuple[int, ...]]:
        """Take entries of a buffer, when there are enough."""
        taken = buffer.try_take(count, self.peer)
        while taken is None:
            self.waits_for = buffer
            yield
            taken = buffer.try_take(count, self.peer)
        self.waits_for = None
        return taken

    def _finish(self, read: EntryRead) -> Generator[None, None, None]:
        """Post a read, wait until it has ended, and give its transfers back."""
        read.post(self.reads)
        yield from self.reads.until_done(read.transfers)
        for transfer in read.transfers:
            self.reads.finished(transfer)


@dataclass(slots=True, eq=False)
class LeaseFence:
    """The slot of one load's lease, read before the data and after it on every producer worker that is read from.

    A producer changes the slot before it gives a block away. So data that was read between two readings of READY under
    the same epoch is what the lease promised, however long the read took and whatever else was written meanwhile.

    Attributes:
        source: the params that name the lease.
        lease_reads: read the slot.
        progress: of the load.
        epoch: that the lease must have after the data. A streamed read changes it when the producer has preempted the
            prompt.
        opens_until_s: until when the producer may open the slot, on the monotonic clock.
        read_s: when the reading of the slot began that the last words are from: they are at least as new.
    """

    source: RemotePrefill
    lease_reads: LeaseReads
    progress: Progress
    epoch: Epoch
    opens_until_s: float
    read_s: float = -math.inf

    def wait_until_ready(self, peer: Peer) -> Steps:
        """The fence before the data: wait until the slot is READY on every producer worker.

        Raises:
            LoadFailed: the lease has ended.
            FabricError: the slot cannot be read.
        """
        may_be_unopened = True
        words = yield from self.read_slot(peer)
        while not self.is_ready(words):
            ready = slot_word(self.epoch, SlotState.READY)
            computing = slot_word(self.epoch, SlotState.COMPUTING)
            is_open = all(state in (ready, computing) for state, _ in words)
            if is_open:
                # It was open: from now on any other word says that the lease has ended.
                may_be_unopened = False
                words = yield from self.wait_for_change(peer, words, math.inf)
                continue
            # Both legs of a request may arrive at once, so the slot may not be open yet. The time is judged by when
            # the reading began: a slot that opened while this process stood still is found open.
            if not may_be_unopened or self.read_s >= self.opens_until_s:
                raise LoadFailed(
                    FailureReason.FENCE, "the lease had ended before the read"
                )
            words = yield from self.wait_for_change(peer, words, self.opens_until_s)

    def check_after(self, peer: Peer) -> Steps:
        """The fence after the data: only READY on every producer worker is good.

        Raises:
            LoadFailed: the lease has ended, so the blocks may have been given away during the read.
            FabricError: the slot cannot be read.
        """
        words = yield from self.read_slot(peer)
        if not self.is_ready(words):
            raise LoadFailed(FailureReason.FENCE, "the lease had ended after the read")

    def is_ready(self, words: SlotWords) -> bool:
        """Whether every producer worker says READY under the epoch of this load."""
        ready = slot_word(self.epoch, SlotState.READY)
        return all(state == ready for state, _ in words)

    def read_slot(self, peer: Peer) -> Generator[None, None, SlotWords]:
        """Read the slot's words now.

        Raises:
            FabricError: the slot cannot be read, or the words say nothing of the data.
        """
        self.progress.turn = peer.data_reads.entered
        self.read_s = time.monotonic()
        slot = self.source.kvferry.lease_slot
        words = yield from self.lease_reads.words(peer.slots, slot)
        # The words lie in a file, and stay as they are when the process dies. Mapped memory of a device need not.
        if peer.mapped_routes and peer.may_be_freed():
            raise PeerLost("read a slot", "its process has ended", str(peer.key))
        return words

    def wait_for_change(
        self, peer: Peer, words: SlotWords, until_s: float
    ) -> Generator[Wait | None, None, SlotWords]:
        """Park until the slot's words are others than these, or until a time. Returns the words."""
        wait = Wait(
            peer=peer,
            slot=self.source.kvferry.lease_slot,
            words=words,
            epoch=self.epoch,
            num_tokens=self.source.remote_num_tokens,
            until_s=until_s,
        )
        # A parked load holds nothing: thousands of them may wait for one slow producer, and the watch has entries of
        # its own.
        self.lease_reads.give_back()
        self.progress.turn = peer.data_reads.entered
        yield wait
        if wait.error is not None:
            raise wait.error
        self.read_s = wait.read_s
        if wait.words != words:
            self.progress.changes += 1
        return wait.words


@dataclass(eq=False)
class MappedReads:
    """Copies from the producer's mapped memory into the request's blocks.

    Attributes:
        record: of the load.
        changes: grows with every launch that has ended.
    """

    record: LoadRecord
    changes: int = 0
    # Those of all launches. They keep the maps that they read through, even if their producer is lost meanwhile.
    _relayouts: dict[Relayout, None] = field(default_factory=dict)
    # Of the last launch. All launches of a worker are on one stream, so it is reached after the others.
    _mark: DeviceMark | None = None

    def steps(
        self, routes: Iterable[MappedRoute], units: Mapping[TokenMap, UnitPairs]
    ) -> Generator[None, None, None]:
        """Copy these units; ends when every byte is in place.

        Raises:
            InvalidTable: a copy would leave the memory that is mapped, or the caches.
        """
        is_first = True
        for route in routes:
            for table, num_bytes in route.tables(units):
                if not is_first:
                    # One launch may take milliseconds of this thread, so other loads have their turn between two.
                    yield
                is_first = False
                yield from self._launch(route.relayout, table)
                self.record.planned_bytes += num_bytes
                self.record.mapped_bytes += num_bytes
                self.changes += 1
        while not self.settle():
            yield

    def _launch(
        self, relayout: Relayout, table: WaveTable
    ) -> Generator[None, None, None]:
        self._relayouts[relayout] = None
        try:
            mark = relayout.try_start(table)
            # The device is behind: all tables are in use.
            while mark is None:
                yield
                mark = relayout.try_start(table)
        except Exception:
            # What was launched before the error still writes.
            self._mark = relayout.mark()
            raise
        self._mark = mark

    def settle(self) -> bool:
        """Whether no launch writes into the request's blocks any more."""
        return self._mark is None or self._mark.reached()


_BEFORE_DATA = (Stage.QUEUED, Stage.CONNECTING, Stage.FENCE)


@dataclass(slots=True, eq=False)
class DataReads:
    """The data reads of one load. Everything of it that may still write into the request's blocks is in `reads` and in
    the waves of the pool at any moment, whatever happens to its steps.

    Attributes:
        reads: the load's, which settles them.
        record: of the load; its planned bytes and its stages are noted here.
        progress: of the load.
        mapped: copies what is mapped.
        staged: reads what goes through the pool; None before any does.
    """

    context: LoadContext
    reads: Reads
    record: LoadRecord
    progress: Progress
    mapped: MappedReads
    staged: StagedReads | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything was to be read into the request's blocks. Before that the load's reads write only into
        entries and pages of the worker, so the blocks are safe whatever is in flight."""
        return self.record.stage not in _BEFORE_DATA

    @property
    def lacks_room(self) -> bool:
        """Whether it waits for a part of the pool that it cannot get before a failed read has ended."""
        return self.staged is not None and self.staged.lacks_room

    @property
    def waves(self) -> list[Wave]:
        """The waves of the staging pool that it holds."""
        if self.staged is None:
            return []
        return self.staged.waves()

    @property
    def copies_progress(self) -> int:
        """Grows with every wave that begins, is read, or is in place, and with every launch from mapped memory."""
        if self.staged is None:
            return self.mapped.changes
        return self.staged.progress() + self.mapped.changes

    def staged_transfers(self) -> int:
        """Transfers into the pool that have not been given back."""
        if self.staged is None:
            return 0
        return self.staged.transfers()

    def settle_copies(self) -> bool:
        """Give back the waves that are safe, and quarantine the others. Returns whether none is left, and nothing is
        copied from mapped memory."""
        has_no_waves = self.staged is None or self.staged.settle()
        return self.mapped.settle() and has_no_waves

    def steps(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> Steps:
        """Read these units; ends when every byte is in place.

        Raises:
            FabricError: a read failed; it and the others stay in `reads` until they are settled.
        """
        # The later parts of a streamed prompt find the load in READING, where it stays.
        if self.record.stage is Stage.FENCE:
            self.record.go_on(Stage.POSTING, time.monotonic())
        self.progress.turn = peer.data_reads.entered
        peer.data_reads.entered += 1
        # The peer's queue is left however the load ends: closing its steps raises GeneratorExit here.
        try:
            # Direct reads are posted first, and are under way while the staged ones go wave by wave.
            transfers = self._post(peer, units)
            if self.record.stage is Stage.POSTING:
                self.record.go_on(Stage.READING, time.monotonic())
            if peer.mapped_routes:
                yield from self.mapped.steps(peer.mapped_routes, units)
            if peer.sources:
                yield from self._read_staged(peer, units)
            yield from self.reads.until_done(transfers)
            for transfer in transfers:
                # Before the transfer is given back: NIXL forgets its telemetry with it.
                self.record.count(self.context.reader.fabric.telemetry(transfer))
                self.reads.finished(transfer)
        finally:
            peer.data_reads.ended += 1

    def _post(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> list[Transfer]:
        """Post the reads that go straight into the caches: one for each route with anything to read."""
        transfers: list[Transfer] = []
        for route in peer.routes:
            prepared = route.table
            if prepared is None:
                continue
            wanted = descriptor_pairs(prepared.table, units)
            # Nothing of this table is wanted, such as a window's tensors in the first parts of a prompt.
            if not len(wanted.local):
                continue
            transfer = self.reads.post(
                prepared.local, wanted.local, prepared.remote, wanted.remote
            )
            transfers.append(transfer)
            self.record.planned_bytes += wanted.num_bytes
            self.record.planned_descriptors += len(wanted.local)
        return transfers

    def _read_staged(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> Steps:
        """Read the sources that the plan stages, wave by wave."""
        staging = self.context.staging
        if staging is None:
            return
        sources: list[tuple[PreparedSource, SourceUnits]] = []
        for source in peer.sources:
            staged = source.table.source
            sources.append((source, source_units(staged, units[staged.tokens])))
        # With the boot: what an engine's former life has left in quarantine is not this one's share of the pool.
        peer_name = f"{peer.key}/{peer.key.boot}"
        self.staged = StagedReads(self.context.reader, staging, self.record, peer_name)
        yield from self.staged.steps(sources)


Units: TypeAlias = dict[TokenMap, UnitPairs]
"""The units of a request, by how their tokens are mapped."""

ReadSteps: TypeAlias = Generator[Wait | None, None, Units]
"""Steps that read, and return the units that they have read."""


class Reading(Protocol):
    """How a load reads from a peer."""

    @property
    def blocks(self) -> RequestBlocks:
        """All that is loaded, once it is prepared."""

    def prepare(self, peer: Peer) -> None:
        """Check the params against the peer, before anything is read.

        Raises:
            InvalidParams: they do not fit.
        """

    def steps(self, peer: Peer) -> ReadSteps:
        """Read everything; ends when the slot has said READY and every byte is in place.

        Raises:
            LoadFailed: the lease has ended.
            InvalidParams: the producer's blocks do not fit.
            FabricError: a read failed.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LoadParts:
    """The parts of one load that its reading uses."""

    order: LoadOrder
    groups: tuple[CacheGroup, ...]
    fence: LeaseFence
    lease_reads: LeaseReads
    data: DataReads
    record: LoadRecord
    progress: Progress


@dataclass(slots=True, eq=False)
class WholeRead:
    """Reads a prompt when all of it is complete."""

    parts: LoadParts
    blocks: RequestBlocks = field(init=False)
    units: Units = field(init=False)

    def prepare(self, peer: Peer) -> None:
        parts = self.parts
        order = parts.order
        self.blocks = RequestBlocks(
            local=order.local_blocks,
            remote=order.source.remote_block_ids,
            first_token=order.first_token,
            stop_token=order.stop_token,
            num_tokens=order.source.remote_num_tokens,
        )
        # Not after the fence: pairing takes time that grows with the blocks, and the producer may not be ready yet.
        self.units = pair_request(
            peer.plan, parts.groups, peer.description.groups, self.blocks
        )

    def steps(self, peer: Peer) -> ReadSteps:
        yield from self.parts.fence.wait_until_ready(peer)
        yield from self.parts.data.steps(peer, self.units)
        return self.units
