"""One load, from its order to its last byte, as a sequence of steps.

    connect ─→ prepare ─→ mark of the device ─→ reading (fence, data) ─→ zero the tail ─→ fence again ─→ loaded
    peer       params      the blocks' last      whole or streamed
                           owner is done

The steps are generators: a `yield` means that there is nothing to do at present. Nothing waits and nothing sleeps: the
transfer thread resumes every load in turn. Whatever happens to the generator, everything that may still write into the
request's blocks is in `reads`, `data` and `zeroed` of the `Load`, and `settle` asks these alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Hashable
from dataclasses import dataclass, field

from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.protocol.params import check_params_mac
from kvferry.protocol.slots import (
    Done,
    encode_notification,
    epoch_from_text,
    epoch_to_text,
)
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import FabricError, internal_errors
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.loads.reading import (
    DataReads,
    LeaseFence,
    LeaseReads,
    LoadContext,
    LoadParts,
    MappedReads,
    Reading,
    WholeRead,
)
from kvferry.worker.loads.results import LoadRecord, LoadStory, Stage
from kvferry.worker.loads.slot_watch import Steps, Wait
from kvferry.worker.loads.state import Deadline, LoadFailed, LoadState, Progress
from kvferry.worker.loads.streamed_read import StreamedRead
from kvferry.worker.peers.peer import Peer
from kvferry.worker.peers.registry import Unavailable
from kvferry.worker.staging.pool import Wave


@dataclass(slots=True, eq=False)
class Load:
    """One load.

    Attributes:
        mark: when it is reached, the device has finished everything that was launched before the blocks were given
            to this request.
        boot: this engine's, by which the producer counts reports.
        record: all that metrics, traces and logs say of it.
        deadline: by which it must have progressed, and be over.
        state: changed by `LoadsByState` alone, like the three that follow.
        since_s: when it has entered its state, on the monotonic clock.
        wait: what it waits for while it is PARKED.
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
    record: LoadRecord
    deadline: Deadline
    state: LoadState = LoadState.WAITING
    since_s: float = 0.0
    wait: Wait | None = None
    story: LoadStory = field(init=False)
    peer: Peer | None = None
    reads: Reads = field(init=False)
    lease_reads: LeaseReads = field(init=False)
    fence: LeaseFence = field(init=False)
    data: DataReads = field(init=False)
    reading: Reading = field(init=False)
    zeroed: DeviceMark | None = None
    undelivered: int = 0
    resumed_steps: Steps = field(init=False)
    _progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        context = self.context
        source = self.order.source
        self.since_s = self.record.ordered_s
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
            opens_until_s=self.record.ordered_s + source.kvferry.opens_within_s,
        )
        self.data = DataReads(
            context, self.reads, self.record, self._progress, MappedReads(self.record)
        )
        parts = LoadParts(
            order=self.order,
            groups=context.groups,
            fence=self.fence,
            lease_reads=self.lease_reads,
            data=self.data,
            record=self.record,
            progress=self._progress,
        )
        if source.kvferry.stream_row is None:
            self.reading = WholeRead(parts)
        else:
            self.reading = StreamedRead(parts)
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

    def steps(self) -> Steps:
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
                    self.lease_reads.post_slot(route, message.slot)
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
