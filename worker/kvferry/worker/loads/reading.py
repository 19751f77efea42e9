"""How a load reads: into the request's blocks, through the staging pool, or from the producer's mapped memory.

A `Load` has one `Reading`: of a whole prompt at once (`WholeRead`), or part by part while it is computed
(`streamed_read.py`). Either has its bytes read by `DataReads`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvferry.plan.blocks import RequestBlocks, UnitPairs, Wanted, pair_request
from kvferry.plan.descriptors import descriptor_pairs
from kvferry.plan.tokens import TokenMap
from kvferry.plan.waves import SourceUnits, source_units
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.entries import IdPages, SlotReads
from kvferry.worker.fabric.port import Transfer
from kvferry.worker.fabric.reads import FabricReader, Reads
from kvferry.worker.loads.fence import LeaseFence, LeaseReads
from kvferry.worker.loads.results import LoadRecord, Stage
from kvferry.worker.loads.slot_watch import Steps, Wait
from kvferry.worker.loads.state import LoadFailed, Progress
from kvferry.worker.loads.tail_zeroing import TailZeroing
from kvferry.worker.peers.mapped_route import MappedRoute
from kvferry.worker.peers.peer import Peer
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


class MappedReads:
    """See the module. Used on the transfer thread only.

    Attributes:
        changes: grows with every launch that has ended.
    """

    def __init__(self, record: LoadRecord) -> None:
        self.changes = 0
        self._record = record
        # Those of all launches. They keep the maps that they read through, even if their producer is lost meanwhile.
        self._relayouts: dict[Relayout, None] = {}
        # Of the last launch. All launches of a worker are on one stream, so it is reached after the others.
        self._mark: DeviceMark | None = None

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
                self._record.planned_bytes += num_bytes
                self._record.mapped_bytes += num_bytes
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


class DataReads:
    """The data reads of one load. Everything of it that may still write into the request's blocks is in `reads` and in
    the waves of the pool at any moment, whatever happens to its steps.

    Args:
        reads: the load's, which settles them.
        record: of the load; its planned bytes and its stages are noted here.
        progress: of the load.
    """

    __slots__ = ("_context", "_mapped", "_progress", "_reads", "_record", "_staged")

    def __init__(
        self, context: LoadContext, reads: Reads, record: LoadRecord, progress: Progress
    ) -> None:
        self._context = context
        self._reads = reads
        self._record = record
        self._progress = progress
        self._staged: StagedReads | None = None
        self._mapped = MappedReads(record)

    @property
    def has_begun(self) -> bool:
        """Whether anything was to be read into the request's blocks. Before that the load's reads write only into
        entries and pages of the worker, so the blocks are safe whatever is in flight."""
        return self._record.stage not in _BEFORE_DATA

    @property
    def lacks_room(self) -> bool:
        """Whether it waits for a part of the pool that it cannot get before a failed read has ended."""
        return self._staged is not None and self._staged.lacks_room

    @property
    def waves(self) -> list[Wave]:
        """The waves of the staging pool that it holds."""
        if self._staged is None:
            return []
        return self._staged.waves()

    @property
    def copies_progress(self) -> int:
        """Grows with every wave that begins, is read, or is in place, and with every launch from mapped memory."""
        if self._staged is None:
            return self._mapped.changes
        return self._staged.progress() + self._mapped.changes

    def staged_transfers(self) -> int:
        """Transfers into the pool that have not been given back."""
        if self._staged is None:
            return 0
        return self._staged.transfers()

    def settle_copies(self) -> bool:
        """Give back the waves that are safe, and quarantine the others. Returns whether none is left, and nothing is
        copied from mapped memory."""
        has_no_waves = self._staged is None or self._staged.settle()
        return self._mapped.settle() and has_no_waves

    def steps(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> Steps:
        """Read these units; ends when every byte is in place.

        Raises:
            FabricError: a read failed; it and the others stay in `reads` until they are settled.
        """
        self._end_stage(Stage.FENCE, Stage.POSTING)
        self._progress.turn = peer.data_reads.enter()
        # The peer's queue is left however the load ends: closing its steps raises GeneratorExit here.
        try:
            # Direct reads are posted first, and are under way while the staged ones go wave by wave.
            transfers = self._post(peer, units)
            self._end_stage(Stage.POSTING, Stage.READING)
            if peer.mapped_routes:
                yield from self._mapped.steps(peer.mapped_routes, units)
            if peer.sources:
                yield from self._read_staged(peer, units)
            yield from self._finish(transfers)
        finally:
            peer.data_reads.leave()

    def _end_stage(self, stage: Stage, following: Stage) -> None:
        """Go on from one stage to the following one. The second part of a streamed prompt finds the load in READING,
        where it stays."""
        if self._record.stage is stage:
            self._record.go_on(following, time.monotonic())

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
            transfer = self._reads.post(
                prepared.local, wanted.local, prepared.remote, wanted.remote
            )
            transfers.append(transfer)
            self._record.planned_bytes += wanted.num_bytes
            self._record.planned_descriptors += len(wanted.local)
        return transfers

    def _read_staged(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> Steps:
        """Read the sources that the plan stages, wave by wave."""
        staging = self._context.staging
        if staging is None:
            return
        sources: list[tuple[PreparedSource, SourceUnits]] = []
        for source in peer.sources:
            staged = source.table.source
            sources.append((source, source_units(staged, units[staged.tokens])))
        # With the boot: what an engine's former life has left in quarantine is not this one's share of the pool.
        peer_name = f"{peer.key}/{peer.key.boot}"
        self._staged = StagedReads(
            self._context.reader, staging, self._record, peer_name
        )
        yield from self._staged.steps(sources)

    def _finish(self, transfers: list[Transfer]) -> Steps:
        """Poll the direct reads until all are done, count them, and give them back."""
        yield from self._reads.until_done(transfers)
        for transfer in transfers:
            # Before the transfer is given back: NIXL forgets its telemetry with it.
            self._record.count(self._context.reader.fabric.telemetry(transfer))
            self._reads.finished(transfer)


Units: TypeAlias = dict[TokenMap, UnitPairs]
"""The units of a request, by how their tokens are mapped."""

ReadSteps: TypeAlias = Generator[Wait | None, None, Units]
"""Steps that read, and return the units that they have read."""


class Reading(Protocol):
    """How a load reads from a peer."""

    @property
    def blocks(self) -> RequestBlocks:
        """All that is loaded."""

    def prepare(self, peer: Peer) -> None:
        """Check the params against the peer, before anything is read.

        Raises:
            LoadFailed: they do not fit.
        """

    def steps(self, peer: Peer) -> ReadSteps:
        """Read everything; ends when the slot has said READY and every byte is in place.

        Raises:
            LoadFailed: the lease has ended.
            FabricError: a read failed.
        """


@dataclass(slots=True, eq=False)
class LoadParts:
    """The parts of one load that its reading uses."""

    order: LoadOrder
    groups: tuple[CacheGroup, ...]
    fence: LeaseFence
    lease_reads: LeaseReads
    data: DataReads
    record: LoadRecord
    progress: Progress

    def pair_units(
        self, peer: Peer, blocks: RequestBlocks, wanted: Wanted | None = None
    ) -> Units:
        """The units of these blocks on both sides.

        Raises:
            LoadFailed: the producer's blocks do not fit.
        """
        try:
            return pair_request(
                peer.plan, self.groups, peer.description.groups, blocks, wanted=wanted
            )
        except InvalidParams as invalid:
            raise LoadFailed(FailureReason.PARAMS, str(invalid)) from None


class WholeRead:
    """Reads a prompt when all of it is complete."""

    __slots__ = ("_parts", "_units", "blocks")

    def __init__(self, parts: LoadParts) -> None:
        order = parts.order
        self.blocks = RequestBlocks(
            local=order.local_blocks,
            remote=order.source.remote_block_ids,
            first_token=order.first_token,
            stop_token=order.stop_token,
            num_tokens=order.source.remote_num_tokens,
        )
        self._parts = parts
        self._units: Units = {}

    def prepare(self, peer: Peer) -> None:
        # Not after the fence: pairing takes time that grows with the blocks, and the producer may not be ready yet.
        self._units = self._parts.pair_units(peer, self.blocks)

    def steps(self, peer: Peer) -> ReadSteps:
        yield from self._parts.fence.wait_until_ready(peer)
        yield from self._parts.data.steps(peer, self._units)
        return self._units
