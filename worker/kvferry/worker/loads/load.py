"""One load, from its order to its last byte, as a sequence of steps.

    connect ─→ prepare ─→ mark of the device ─→ reading (fence, data) ─→ zero the tail ─→ fence again ─→ loaded
    peer       params      the blocks' last      whole or streamed
                           owner is done

The slot of its lease is its fence (`LeaseFence`). Between two readings of it come the data (`DataReads`): into the
request's blocks, through the staging pool, or from the producer's mapped memory. A `Load` has one `Reading`, which puts
these in order: of a whole prompt at once (`WholeRead`), or part by part while it is computed (`streamed_read.py`). What
the blocks hold beside the request is zeroed (`TailZeroing`): a kernel may read it.

The steps are generators: a `yield` means that there is nothing to do at present. Nothing waits and nothing sleeps: the
transfer thread resumes every load in turn. Whatever happens to the generator, everything that may still write into the
request's blocks is in `reads`, `data` and `zeroed` of the `Load`, and `settle` asks these alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import (
    Callable,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.plan.blocks import (
    Gap,
    RequestBlocks,
    UnitPairs,
    descriptor_pairs,
    gaps,
    pair_request,
)
from kvferry.plan.tokens import TokenMap
from kvferry.plan.waves import SourceUnits, source_units
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.protocol.params import RemotePrefill, check_params_mac
from kvferry.protocol.slots import (
    Done,
    SlotState,
    encode_notification,
    epoch_from_text,
    epoch_to_text,
    slot_word,
)
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import FabricError, PeerLost, internal_errors
from kvferry.worker.fabric.port import Transfer
from kvferry.worker.fabric.reads import (
    FabricReader,
    IdPages,
    LeaseReads,
    Reads,
    SlotReads,
    SlotWords,
)
from kvferry.worker.loads.mapped_reads import MappedReads
from kvferry.worker.loads.results import LoadRecord, LoadStory, Stage
from kvferry.worker.loads.slot_watch import LoadSteps, Wait
from kvferry.worker.loads.state import Deadline, LoadFailed, LoadState, Progress
from kvferry.worker.peers.peer import Peer, PeerKey
from kvferry.worker.peers.registry import PeerRegistry, Unavailable
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.shape import CopyAxis, Shape
from kvferry.worker.relayout.wave_table import Pieces, WaveTable
from kvferry.worker.staging.buffer import PreparedSource, Staging, relayout_for
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


# The fence.


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

    def wait_until_ready(self, peer: Peer) -> LoadSteps:
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

    def check_after(self, peer: Peer) -> LoadSteps:
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


# The data.


_BEFORE_DATA = (Stage.QUEUED, Stage.CONNECTING, Stage.FENCE)


@dataclass(slots=True, eq=False)
class DataReads:
    """The data reads of one load. Everything of it that may still write into the request's blocks is in `reads` and in
    the waves of the pool at any moment, whatever happens to its steps.

    Attributes:
        reads: the load's, which settles them.
        record: of the load; its planned bytes and its stages are noted here.
        progress: of the load.
        mapped: copies from the producer's mapped memory; None before any does.
        staged: reads what goes through the pool; None before any does.
    """

    context: LoadContext
    reads: Reads
    record: LoadRecord
    progress: Progress
    mapped: MappedReads | None = None
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
        changes = 0
        if self.staged is not None:
            changes += self.staged.progress()
        if self.mapped is not None:
            changes += self.mapped.changes
        return changes

    def staged_transfers(self) -> int:
        """Transfers into the pool that have not been given back."""
        if self.staged is None:
            return 0
        return self.staged.transfers()

    def settle_copies(self) -> bool:
        """Give back the waves that are safe, and quarantine the others. Returns whether none is left, and nothing is
        copied from mapped memory."""
        has_no_waves = self.staged is None or self.staged.settle()
        has_no_copies = self.mapped is None or self.mapped.settle()
        return has_no_waves and has_no_copies

    def steps(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> LoadSteps:
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
                # One for all parts of a streamed prompt: a launch of an earlier part may still write.
                if self.mapped is None:
                    self.mapped = MappedReads(self.record)
                yield from self.mapped.steps(peer.mapped_routes, units)
            if peer.sources:
                yield from self._read_staged(peer, units)
            yield from self.reads.until_done(transfers, self.record.count)
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

    def _read_staged(
        self, peer: Peer, units: Mapping[TokenMap, UnitPairs]
    ) -> LoadSteps:
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


# What reads them in order, and the load.


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


@dataclass(slots=True, eq=False)
class Load:
    """One load.

    Attributes:
        mark: when it is reached, the device has finished everything that was launched before the blocks were given
            to this request.
        boot: this engine's, by which the producer counts reports.
        ordered_s: when the worker had the order, on the monotonic clock.
        deadline: by which it must have progressed, and be over.
        make_reading: makes its `reading`.
        state: changed by `LoadsByState` alone, like the three that follow.
        since_s: when it has entered its state, on the monotonic clock.
        wait: what it waits for while it is PARKED.
        record: all that metrics, traces and logs say of it.
        story: its last events.
        peer: the peer it reads from, once connected.
        reads: the reads that may still write into the request's blocks, or into the memory of `lease_reads`.
        data: the data reads; those through the staging pool may still write too.
        zeroed: reached when the device has zeroed what was not loaded; until then it may still write as well.
        reading: how it reads: the whole prompt, or part by part.
        undelivered: producer workers that could not be notified.
        resumed_steps: its steps, as far as they have been resumed.
    """

    order: LoadOrder
    mark: DeviceMark
    context: LoadContext
    boot: str
    ordered_s: float
    deadline: Deadline
    make_reading: Callable[[LoadParts], Reading]
    state: LoadState = LoadState.WAITING
    since_s: float = field(init=False)
    wait: Wait | None = None
    record: LoadRecord = field(init=False)
    story: LoadStory = field(init=False)
    peer: Peer | None = None
    reads: Reads = field(init=False)
    lease_reads: LeaseReads = field(init=False)
    fence: LeaseFence = field(init=False)
    data: DataReads = field(init=False)
    reading: Reading = field(init=False)
    zeroed: DeviceMark | None = None
    undelivered: int = 0
    resumed_steps: LoadSteps = field(init=False)
    _progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        context = self.context
        source = self.order.source
        self.since_s = self.ordered_s
        self.record = LoadRecord(
            request_id=self.order.request_id,
            source=PeerKey(
                host=source.remote_host,
                port=source.remote_port,
                engine_id=source.engine_id,
                boot=source.kvferry.boot,
            ),
            ordered_s=self.ordered_s,
        )
        self.story = LoadStory(self.record)
        self.reads = Reads(context.reader)
        self.lease_reads = LeaseReads(
            self.reads,
            context.slot_reads,
            context.id_pages,
            peer=(source.remote_host, source.remote_port),
        )
        self.fence = LeaseFence(
            source,
            self.lease_reads,
            self._progress,
            epoch=epoch_from_text(source.kvferry.lease_epoch),
            opens_until_s=self.ordered_s + source.kvferry.opens_within_s,
        )
        self.data = DataReads(context, self.reads, self.record, self._progress)
        parts = LoadParts(
            order=self.order,
            groups=context.groups,
            fence=self.fence,
            lease_reads=self.lease_reads,
            data=self.data,
            record=self.record,
            progress=self._progress,
        )
        self.reading = self.make_reading(parts)
        # Made at once, though it begins when it is first resumed: closing it ends a load that has not begun, too.
        self.resumed_steps = self.steps()

    def __str__(self) -> str:
        return f"req={self.record.request_id} peer={self.record.source}"

    @property
    def entries(self) -> tuple[int, ...]:
        """The entries for slot reads that it holds."""
        return self.lease_reads.entries

    @property
    def has_read_data(self) -> bool:
        """Whether it has begun to read into the request's blocks."""
        return self.data.has_begun

    @property
    def is_connecting(self) -> bool:
        """Whether it waits for its peer's handshake, which has deadlines of its own."""
        return self.peer is None

    @property
    def lacks_room(self) -> bool:
        """Whether it waits for a part of the pool that it cannot get before a failed read has ended."""
        return self.data.lacks_room

    def transfers(self) -> int:
        """Transfers that have not been given back."""
        return len(self.reads) + self.data.staged_transfers()

    def waves(self) -> list[Wave]:
        """The waves of the staging pool that it holds."""
        return self.data.waves

    def progress(self) -> Hashable:
        """Its progress, to be compared with that at another time; see `loads.state`."""
        ended_before_it = 0
        # Reads of one producer share its link: while those before it end, this one is on its way. Those behind it do
        # not count, or a busy peer would keep a lost read waiting.
        if self.peer is not None:
            ended_before_it = min(self.peer.data_reads.ended, self._progress.turn)
        return (
            self.record.stage,
            self._progress.changes,
            ended_before_it,
            self.data.copies_progress,
            self.lease_reads.queue_moves,
        )

    def steps(self) -> LoadSteps:
        """The steps of the load, from connecting to the last byte.

        Raises:
            LoadFailed, InvalidParams: the blocks must not be used.
            FabricError: the fabric failed; the peer may be lost.
        """
        record = self.record
        record.go_on(Stage.CONNECTING, time.monotonic())
        self.peer = yield from self._connect_peer()
        self.reading.prepare(self.peer)
        # vLLM may give blocks to this request while the device still writes them for their last owner (drafters, and
        # the writes of aligned states): a read that came earlier would be overwritten.
        while not self.mark.reached():
            yield None
        record.go_on(Stage.FENCE, time.monotonic())
        units = yield from self.reading.steps(self.peer)
        record.go_on(Stage.FENCE_AGAIN, time.monotonic())
        # What the blocks hold beside the request is zeroed. Before the second fence, not after it: the device works
        # while the slot is read.
        zeroing = self.context.tail_zeroing
        try:
            self.zeroed = zeroing.zero(units, self.context.groups, self.reading.blocks)
        except Exception:
            # What was launched before the error still writes.
            self.zeroed = zeroing.mark()
            raise
        yield from self.fence.check_after(self.peer)
        while self.zeroed is not None and not self.zeroed.reached():
            yield None
        record.end(time.monotonic())

    def settle(self) -> bool:
        """Give back everything that can write no more; raises nothing, unless the device itself has failed.

        Returns:
            Whether nothing is in flight: the blocks are safe to use again.
        """
        none_is_read = self.reads.settle()
        if none_is_read:
            self.lease_reads.give_back()
        # Both are asked, whatever the reads say: waves that are safe are given back although a read is still out.
        copies_are_safe = self.data.settle_copies()
        # On a device zeroing is launched, not done: it could reach the blocks' next owner.
        is_zeroed = self.zeroed is None or self.zeroed.reached()
        return none_is_read and copies_are_safe and is_zeroed

    def notify_producers(self) -> None:
        """Notify every producer worker that this worker needs nothing more under the lease; raises nothing.

        Workers that could not be notified free the blocks when the lease runs out.
        """
        if self.peer is None:
            return
        for route in self.peer.routes:
            message = Done(
                slot=self.order.source.kvferry.lease_slot,
                epoch=epoch_to_text(self.fence.epoch),
                consumer=self.boot,
                worker=self.context.worker,
                expected=route.route.expected,
            )
            try:
                self.context.reader.fabric.notify(
                    route.agent, encode_notification(message)
                )
                # A read is posted behind each message: over TCP, NIXL completes the peer's next read only after the
                # answer to the message. This read absorbs the wait, which would cost the next load 0.2 ms (measured
                # over loopback).
                with contextlib.suppress(FabricError):
                    self.lease_reads.post_slot(route.slots, message.slot)
            except FabricError:
                self.undelivered += 1
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log(
                    f"{self}: the load is good, but a producer was not notified"
                )
                self.undelivered += 1

    def _connect_peer(self) -> Generator[None, None, Peer]:
        """Wait until the peer is connected, whose description the params must fit.

        Raises:
            LoadFailed: it cannot be, the params were not written by it, or they do not fit.
        """
        source = self.order.source
        peer: Peer | Unavailable | None = None
        while peer is None:
            peer = self.context.registry.get(self.record.source, time.monotonic())
            if peer is None:
                yield
        if isinstance(peer, Unavailable):
            raise LoadFailed(peer.reason, peer.text)
        # Only now: the key of the MAC comes with the peer's description.
        try:
            check_params_mac(source, peer.description.mac_key)
        except InvalidParams as invalid:
            raise LoadFailed(FailureReason.MAC, str(invalid)) from None
        num_groups = len(self.context.groups)
        is_of_these_groups = (
            len(source.remote_block_ids) == len(self.order.local_blocks) == num_groups
        )
        if not is_of_these_groups:
            text = f"{len(source.remote_block_ids)} groups of blocks; expected {num_groups}"
            raise LoadFailed(FailureReason.PARAMS, text)
        # NIXL would refuse the index too, but its error names no field of the params.
        slot = source.kvferry.lease_slot
        for slots in peer.slots:
            if slot >= slots.descriptors.count:
                text = f"lease_slot is {slot}; the producer has fewer"
                raise LoadFailed(FailureReason.PARAMS, text)
        return peer


# What was not loaded.


GAPS_PER_GROUP = 2
"""One before the window, one after the last token."""

_WHOLE_BLOCK = 1 << 31


class _Tiles(NamedTuple):
    """The cells of tensors that share their block numbers: `tiles` of `tile_tokens` tokens in each block."""

    group: int
    tile_tokens: int
    tiles: int

    @classmethod
    def of_tensor(cls, tensor: PagedTensor) -> _Tiles:
        return cls(tensor.group, tensor.tile_tokens, tensor.tiles)

    def inside(self, unfilled: Iterable[Gap]) -> Iterator[tuple[int, range]]:
        """The blocks of the gaps, each with its cells that lie in the gap as a whole."""
        for gap in unfilled:
            if gap.group != self.group:
                continue
            first = -(-gap.first // self.tile_tokens)
            stop = min(gap.stop // self.tile_tokens, self.tiles)
            if first < stop:
                yield gap.block, range(first, stop)


class TailZeroing:
    """Zeroes the parts of loaded blocks that the load did not write: after its last token, and before its window.

    A cell that holds several tokens is not divided: only cells with no loaded token at all are zeroed.

    On a device, zeroing is one wave of the relayout, from a source of zeros. Its kernel runs on the relayout's own
    stream, once everything that the load read is in place. The load is reported only after the kernel's mark, so the
    engine launches work that reads the blocks only then.

    Raises:
        ValueError: a tensor in host memory lies in none of the storages.
    """

    def __init__(self, caches: KvCaches) -> None:
        self._device = caches.device
        self._relayout: Relayout | None = None
        divisible = [
            tensor
            for tensor in caches.tensors
            if tensor.tiles > 1 and len(tensor.heads)
        ]
        if caches.device.where.type == "cpu":
            self._cells: dict[_Tiles, list[NDArray[np.uint8]]] = {}
            for tensor in divisible:
                cells = _cells(tensor, caches.storages)
                self._cells.setdefault(_Tiles.of_tensor(tensor), []).append(cells)
            return
        # Made here, not when it is first needed: memory of the device may be made only at registration.
        longest_run = max((_element_bytes(tensor) for tensor in divisible), default=1)
        self._zeros = caches.device.empty(longest_run)
        self._zeros.zero_()
        self._tiles, self._pieces = self._divide(divisible)
        groups = {tiles.group for tiles in self._tiles}
        whole_blocks = [Gap(group, 0, 0, _WHOLE_BLOCK) for group in groups]
        largest = self._table(whole_blocks * GAPS_PER_GROUP)
        self._relayout = relayout_for(
            [self._zeros], caches.storages, caches.device, largest
        )

    def mark(self) -> DeviceMark:
        """A mark that is reached when everything that `zero` has launched so far is done."""
        if self._relayout is None:
            return self._device.mark()
        return self._relayout.mark()

    def zero(
        self,
        units: Mapping[TokenMap, UnitPairs],
        groups: Sequence[CacheGroup],
        request: RequestBlocks,
    ) -> DeviceMark | None:
        """Zero the gaps of a request in every tensor.

        Args:
            units: the loaded units.
            groups: this engine's cache groups.

        Returns:
            A mark that is reached when it is done; None when it is done already, or there is nothing to zero.
        """
        unfilled = list(gaps(units, groups, request))
        if self._relayout is not None:
            return self._zero_on_device(self._relayout, unfilled)
        for tiles, memories in self._cells.items():
            for block, cells in tiles.inside(unfilled):
                for memory in memories:
                    # With numpy: torch would divide the work among its own threads, which then spin while they wait.
                    memory[block, :, cells.start : cells.stop] = 0
        return None

    def _zero_on_device(
        self, relayout: Relayout, unfilled: Sequence[Gap]
    ) -> DeviceMark | None:
        table = self._table(unfilled)
        if not len(table.units):
            return None
        mark = relayout.try_start(table)
        if mark is None:
            return _WaitingTable(relayout, table)
        return mark

    def _divide(self, tensors: Sequence[PagedTensor]) -> tuple[list[_Tiles], Pieces]:
        """The pieces of the relayout: a row for each tensor, and a kind for each set of cells and shape that differ."""
        kinds: dict[tuple[_Tiles, Shape], int] = {}
        rows: list[tuple[int, int, int, int]] = []
        for tensor in tensors:
            kind = kinds.setdefault(
                (_Tiles.of_tensor(tensor), _shape(tensor)), len(kinds)
            )
            rows.append((self._zeros.data_ptr(), tensor.base, kind, 0))
        tiles = [tiles for tiles, _ in kinds]
        shapes = tuple(shape for _, shape in kinds)
        return tiles, Pieces(shapes, np.array(rows, dtype=np.int64).reshape(-1, 4))

    def _table(self, unfilled: Sequence[Gap]) -> WaveTable:
        """The table that copies zeros into the cells in the gaps: a unit is one cell, in all heads of a tensor."""
        ranges: list[tuple[int, int]] = []
        units: list[tuple[int, int, int, int]] = []
        for tiles in self._tiles:
            first = len(units)
            for block, cells in tiles.inside(unfilled):
                units += [(0, 0, block, cell) for cell in cells]
            ranges.append((first, len(units)))
        unit_rows = np.array(units, dtype=np.int32).reshape(-1, 4)
        return WaveTable(self._pieces, tuple(ranges), unit_rows)


class _WaitingTable:
    """A table that waits for room on the device; `reached` starts it once there is room."""

    def __init__(self, relayout: Relayout, table: WaveTable) -> None:
        self._relayout = relayout
        self._table = table
        self._mark: DeviceMark | None = None

    def reached(self) -> bool:
        if self._mark is None:
            self._mark = self._relayout.try_start(self._table)
        return self._mark is not None and self._mark.reached()


def _element_bytes(tensor: PagedTensor) -> int:
    return tensor.element_bytes or tensor.cell_bytes


def _shape(tensor: PagedTensor) -> Shape:
    """One cell in all heads of a tensor, from zeros; its position in the block is its number."""
    elements = tensor.cell_bytes // _element_bytes(tensor)
    # Strides of the source are 0: every element is copied from the same zeros.
    axes = [
        CopyAxis(len(tensor.heads), 0, tensor.head_stride),
        CopyAxis(elements, 0, tensor.element_stride),
    ]
    unit_stride = (tensor.block_stride, tensor.tile_stride)
    return Shape.from_axes(
        axes, _element_bytes(tensor), destination_unit_stride=unit_stride
    )


def _cells(tensor: PagedTensor, storages: Sequence[torch.Tensor]) -> NDArray[np.uint8]:
    """A tensor in host memory, uint8 `[blocks, heads, tiles, elements, element_bytes]`, sharing the caches' memory."""
    element_bytes = _element_bytes(tensor)
    counts = (
        tensor.blocks,
        len(tensor.heads),
        tensor.tiles,
        tensor.cell_bytes // element_bytes,
        element_bytes,
    )
    strides = (
        tensor.block_stride,
        tensor.head_stride,
        tensor.tile_stride,
        tensor.element_stride,
        1,
    )
    for storage in storages:
        memory = (
            torch.empty(0, dtype=torch.uint8).set_(storage.untyped_storage()).numpy()
        )
        offset = tensor.base - memory.ctypes.data
        if 0 <= offset < len(memory):
            return np.ndarray(
                counts, dtype=np.uint8, buffer=memory, offset=offset, strides=strides
            )
    raise ValueError(
        f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations"
    )
