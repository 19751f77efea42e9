"""One load, from its order to its last byte, as a sequence of steps.

The steps are generators: a `yield` means that there is nothing to do at present. Nothing waits, nothing sleeps; the
transfer thread resumes every load in turn. Everything that may still write into the request's blocks is in `reads`,
`staged` and `zeroed` of the `Load` at any moment, whatever happens to the generator.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Hashable, Mapping
from dataclasses import dataclass, field

from kvferry.plan.blocks import RequestBlocks, UnitPairs, Wanted, every, pair_request
from kvferry.plan.descriptors import descriptor_pairs
from kvferry.plan.tokens import TokenMap
from kvferry.plan.waves import source_units
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.ids import Epoch, SlotState, epoch_from_text, epoch_to_text, slot_word
from kvferry.protocol.notifications import Done, encode_notification
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.protocol.params_mac import check_params_mac
from kvferry.worker.device import DeviceMark
from kvferry.worker.fabric.errors import FabricError, internal_errors
from kvferry.worker.fabric.port import Transfer
from kvferry.worker.fabric.reads import Reads
from kvferry.worker.loads.context import LoadContext, LoadFailed, Steps
from kvferry.worker.loads.deadline import Deadline
from kvferry.worker.loads.lease_reads import LeaseReads
from kvferry.worker.loads.results import LoadRecord, Stage
from kvferry.worker.loads.slot_watch import SlotWords, Wait
from kvferry.worker.peers.peer import Peer
from kvferry.worker.peers.registry import Unavailable
from kvferry.worker.staging.pool import Wave
from kvferry.worker.staging.staged_reads import StagedReads

_BEFORE_DATA = (Stage.QUEUED, Stage.CONNECTING, Stage.FENCE)


@dataclass(slots=True, eq=False)
class Load:
    """One load.

    Attributes:
        mark: when it is reached, the device has finished everything that was launched before the blocks were given
            to this request.
        boot: this engine's, by which the producer counts reports.
        record: all that metrics, traces and logs say of it.
        peer: the peer it reads from, once connected.
        reads: the reads that may still write into the request's blocks, or into the memory of `lease_reads`.
        staged: the reads through the staging pool, which may still write too.
        zeroed: reached when the device has zeroed what was not loaded; until then it may still write as well.
        undelivered: producer workers that could not be notified.
        deadline: by which it must have progressed, and be over.
        changes: the changes of its slot, and the parts of a prompt that it has read.
        turn: how many of the peer's data reads had to end before what it waits for, by `ReadQueue.ended`.
        looked_s: when the read of the slot began that it knows the words from: they are at least as new.
        epoch: the epoch that the lease must have after the data.
    """

    order: LoadOrder
    mark: DeviceMark
    context: LoadContext
    boot: str
    record: LoadRecord
    deadline: Deadline
    peer: Peer | None = None
    reads: Reads = field(init=False)
    lease_reads: LeaseReads = field(init=False)
    staged: StagedReads | None = None
    zeroed: DeviceMark | None = None
    undelivered: int = 0
    changes: int = 0
    turn: int = 0
    looked_s: float = -math.inf
    epoch: Epoch = field(init=False)

    def __post_init__(self) -> None:
        context, ticket = self.context, self.order.source.kvferry
        self.reads = context.reader.reads()
        owner = str(self.record.source)
        self.lease_reads = LeaseReads(
            self.reads, context.slot_reads, context.id_pages, ticket.lease_slot, owner
        )
        self.epoch = epoch_from_text(ticket.lease_epoch)

    @property
    def entries(self) -> tuple[int, ...]:
        """The entries for slot reads that it holds."""
        return self.lease_reads.entries

    def transfers(self) -> int:
        """Transfers that have not been given back."""
        return len(self.reads) + (self.staged.transfers() if self.staged is not None else 0)

    def waves(self) -> list[Wave]:
        """The waves of the staging pool that it holds."""
        return self.staged.waves() if self.staged is not None else []

    @property
    def has_read_data(self) -> bool:
        """Whether it has begun to read into the request's blocks. Before that, its reads write only into entries and
        pages of the worker, so the blocks are safe whatever is in flight."""
        return self.record.stage not in _BEFORE_DATA

    @property
    def is_connecting(self) -> bool:
        """Whether it waits for its peer's handshake, which has deadlines of its own."""
        return self.peer is None

    @property
    def lacks_room(self) -> bool:
        """Whether it waits for a part of the pool that it cannot get before a failed read has ended."""
        return self.staged is not None and self.staged.lacks_room

    def progress(self) -> Hashable:
        """Its progress, to be compared with that at another time; see `loads.deadline`."""
        ended = min(self.peer.data_reads.ended, self.turn) if self.peer is not None else 0
        staged = self.staged.progress() if self.staged is not None else 0
        return self.record.stage, self.changes, ended, staged, self.lease_reads.queue_moves

    def steps(self) -> Steps:
        """The steps of the load, from connecting to the last byte.

        Raises:
            LoadFailed: the blocks must not be used.
            FabricError: the fabric failed; the peer may be lost.
        """
        record, now_s = self.record, time.monotonic
        record.go_on(Stage.CONNECTING, now_s())
        peer = self.peer = yield from self._connect_peer()
        units = self._prepare(peer)
        while not self.mark.reached():
            yield None
        record.go_on(Stage.FENCE, now_s())
        units = yield from self._read(peer, units)
        record.go_on(Stage.FENCE_AGAIN, now_s())
        try:
            self.zeroed = self.context.tail_zeroing.zero(units, self.context.groups, self._blocks)
        except Exception:
            self.zeroed = (
                self.context.tail_zeroing.mark()
            )  # what was launched before the error still writes
            raise
        yield from self._check_fence(peer)
        while self.zeroed is not None and not self.zeroed.reached():
            yield None
        record.end(now_s())

    def settle(self) -> bool:
        """Give back everything that can write no more; raises nothing, unless the device itself has failed.

        Returns:
            Whether nothing is in flight: the blocks are safe to use again.
        """
        none_is_read = self.reads.settle()
        if none_is_read:
            self.lease_reads.give_back()
        staged_is_safe = self.staged is None or self.staged.settle()
        is_zeroed = self.zeroed is None or self.zeroed.reached()
        return none_is_read and staged_is_safe and is_zeroed

    def _connect_peer(self) -> Generator[None, None, Peer]:
        while True:
            found = self.context.registry.get(self.record.source, time.monotonic())
            if isinstance(found, Peer):
                try:
                    check_params_mac(self.order.source, found.description.mac_key)
                except InvalidParams as invalid:
                    raise LoadFailed(FailureReason.MAC, str(invalid)) from None
                return found
            if isinstance(found, Unavailable):
                raise LoadFailed(found.reason, found.text)
            yield

    def _prepare(self, peer: Peer) -> dict[TokenMap, UnitPairs]:
        """Check the params against the peer, and pair the units."""
        self._check_params(peer)
        return self._pair_units(peer, self._blocks)

    def _check_params(self, peer: Peer) -> None:
        source, groups = self.order.source, self.context.groups
        if not len(source.remote_block_ids) == len(self.order.local_blocks) == len(groups):
            text = f"{len(source.remote_block_ids)} groups of blocks; expected {len(groups)}"
            raise LoadFailed(FailureReason.PARAMS, text)
        slot = source.kvferry.lease_slot
        if any(slot >= route.slots.count for route in peer.routes):
            raise LoadFailed(FailureReason.PARAMS, f"lease_slot is {slot}; the producer has fewer")

    def _pair_units(
        self, peer: Peer, blocks: RequestBlocks, wanted: Wanted = every
    ) -> dict[TokenMap, UnitPairs]:
        try:
            return pair_request(
                peer.plan, self.context.groups, peer.description.groups, blocks, wanted=wanted
            )
        except InvalidParams as invalid:
            raise LoadFailed(FailureReason.PARAMS, str(invalid)) from None

    @property
    def _blocks(self) -> RequestBlocks:
        """All that it loads."""
        order, source = self.order, self.order.source
        return RequestBlocks(
            local=order.local_blocks,
            remote=source.remote_block_ids,
            first_token=order.first_token,
            stop_token=order.stop_token,
            num_tokens=source.remote_num_tokens,
        )

    def _read(
        self, peer: Peer, units: dict[TokenMap, UnitPairs]
    ) -> Generator[Wait | None, None, dict[TokenMap, UnitPairs]]:
        """Read everything. Returns the units that it has read."""
        yield from self._wait_until_ready(peer)
        yield from self._read_units(peer, units)
        return units

    def _wait_until_ready(self, peer: Peer) -> Steps:
        """The fence before the data: wait until the lease's slot is READY on every producer worker.

        A slot that is COMPUTING is watched, and so is one that may not be open yet.
        """
        ready, computing = self._word(SlotState.READY), self._word(SlotState.COMPUTING)
        opens_until_s = self._opens_until_s
        words = yield from self._slots(peer)
        while not {ready}.issuperset(states := {state for state, _ in words}):
            is_open = states <= {ready, computing}
            if not is_open and self.looked_s >= opens_until_s:
                raise LoadFailed(FailureReason.FENCE, "the lease had ended before the read")
            if is_open:
                opens_until_s = -math.inf
            words = yield from self._wait(peer, words, math.inf if is_open else opens_until_s)

    def _check_fence(self, peer: Peer) -> Steps:
        """The fence after the data: only READY on every producer worker is good."""
        words = yield from self._slots(peer)
        if any(state != self._word(SlotState.READY) for state, _ in words):
            raise LoadFailed(FailureReason.FENCE, "the lease had ended after the read")

    def _slots(self, peer: Peer) -> Generator[None, None, SlotWords]:
        """Read the slot's words now."""
        self.turn = peer.data_reads.turn
        self.looked_s = time.monotonic()
        return (yield from self.lease_reads.slots(peer))

    def _wait(
        self, peer: Peer, words: SlotWords, until_s: float
    ) -> Generator[Wait | None, None, SlotWords]:
        """Park until the slot's words are others, or until a time. Returns the words."""
        source = self.order.source
        wait = Wait(
            peer, source.kvferry.lease_slot, words, self.epoch, source.remote_num_tokens, until_s
        )
        self.lease_reads.give_back()
        self.turn = peer.data_reads.turn
        yield wait
        if wait.error is not None:
            raise wait.error
        self.looked_s = wait.looked_s
        if wait.words != words:
            self.changes += 1
        return wait.words

    @property
    def _opens_until_s(self) -> float:
        """Until when the producer may open the slot."""
        return self.record.ordered_s + self.order.source.kvferry.opens_within_s

    def _word(self, state: SlotState) -> int:
        return slot_word(self.epoch, state)

    def _read_units(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> Steps:
        if self.record.stage is Stage.FENCE:
            self.record.go_on(Stage.POSTING, time.monotonic())
        with (
            peer.data_reads.queued() as self.turn
        ):  # left too if the load ends here: `close` raises GeneratorExit
            handles = self._post_reads(peer, units)
            if self.record.stage is Stage.POSTING:
                self.record.go_on(Stage.READING, time.monotonic())
            yield from self._read_staged(peer, units)
            yield from self._finish(handles)

    def _post_reads(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> list[Transfer]:
        handles = []
        for prepared in (prepared for route in peer.routes for prepared in route.tables):
            wanted = descriptor_pairs(prepared.table, units)
            if len(wanted.local):
                handles.append(
                    self.reads.post(prepared.local, wanted.local, prepared.remote, wanted.remote)
                )
                self.record.planned_bytes += wanted.num_bytes
                self.record.planned_descriptors += len(wanted.local)
        return handles

    def _read_staged(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> Steps:
        sources = [
            (source, source_units(source.table.source, units[source.table.source.tokens]))
            for route in peer.routes
            for source in route.sources
        ]
        if sources and self.context.staging is not None:
            peer_name = f"{peer.key}/{peer.key.boot}"
            reads = StagedReads(self.context.reader, self.context.staging, self.record, peer_name)
            self.staged = reads
            yield from reads.steps(sources)

    def _finish(self, handles: list[Transfer]) -> Steps:
        """Poll data reads until all are done, count them, and give them back.

        A transfer that raises ends the load; it and the others stay in `reads`.
        """
        yield from self.reads.until_done(handles)
        for transfer in handles:
            self.record.count(self.context.reader.fabric.telemetry(transfer))
            self.reads.finished(transfer)

    def tell(self) -> None:
        """Notify every producer worker that this worker needs nothing more under the lease; raises nothing.

        A read is posted behind each message. Over TCP NIXL completes the peer's next read only after the answer to the
        message. The extra read absorbs this wait, which would cost the next load 0.2 ms (measured over loopback).
        """
        for index, route in enumerate(self.peer.routes if self.peer is not None else ()):
            message = Done(
                slot=self.order.source.kvferry.lease_slot,
                epoch=epoch_to_text(self.epoch),
                consumer=self.boot,
                worker=self.context.worker,
                expected=route.route.expected,
            )
            try:
                self.context.reader.fabric.notify(route.agent, encode_notification(message))
                with contextlib.suppress(FabricError):
                    self.lease_reads.post_slot(route, index)
            except FabricError:
                self.undelivered += 1  # the producer will free the blocks when their lease runs out
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log(
                    f"req={self.order.request_id}: the load is good, but a producer was not notified"
                )
                self.undelivered += 1
