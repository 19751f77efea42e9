"""The data reads of one load: into the request's blocks, or through the staging pool."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.descriptors import descriptor_pairs
from kvferry.plan.tokens import TokenMap
from kvferry.plan.waves import source_units
from kvferry.worker.fabric.port import Transfer
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.loads.context import LoadContext
from kvferry.worker.loads.mapped_reads import MappedReads
from kvferry.worker.loads.results import LoadRecord, Stage
from kvferry.worker.loads.slot_watch import Steps
from kvferry.worker.loads.state import Progress
from kvferry.worker.peers.peer import Peer
from kvferry.worker.staging.pool import Wave
from kvferry.worker.staging.staged_reads import StagedReads

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
        # The peer's queue is left however the load ends: closing its steps raises GeneratorExit here.
        with peer.data_reads.queued() as turn:
            self._progress.turn = turn
            # Direct reads are posted first, and are under way while the staged ones go wave by wave.
            transfers = self._post(peer, units)
            self._end_stage(Stage.POSTING, Stage.READING)
            yield from self._mapped.steps(peer.mapped_routes(), units)
            yield from self._read_staged(peer, units)
            yield from self._finish(transfers)

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
        sources = [
            (
                source,
                source_units(source.table.source, units[source.table.source.tokens]),
            )
            for route in peer.routes
            for source in route.sources
        ]
        if not sources or staging is None:
            return
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
