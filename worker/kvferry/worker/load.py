"""One load, from its order to its last byte, told as the steps that it takes.

The steps are generators: a `yield` says that there is nothing to do at present. Nothing waits, nothing sleeps; the
transfer thread resumes every load in turn. What may still write into the request's blocks is in `in_flight`, `staged`
and `erased` of the `Load` at every moment, whatever happens to the generator.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvferry.plan.blocks import RequestBlocks, UnitPairs, pair_request
from kvferry.plan.descriptors import descriptor_pairs
from kvferry.plan.tokens import TokenMap
from kvferry.plan.waves import source_units
from kvferry.protocol.errors import InvalidParams, KvferryError
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.ids import epoch_from_text
from kvferry.protocol.notifications import Done, encode_notification
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.protocol.seal import check_seal
from kvferry.protocol.slots import SlotState, slot_word
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import DeviceMark
from kvferry.worker.eraser import TailEraser
from kvferry.worker.fabric import Fabric, FabricError, Transfer, TransferState
from kvferry.worker.landing import Landing
from kvferry.worker.peer import Peer, PeerKey
from kvferry.worker.peer_book import PeerBook, Unavailable
from kvferry.worker.staged_reads import StagedFigures, StagedReads
from kvferry.worker.staging import Staging
from kvferry.worker.unforeseen import give_back, has_ended

Steps = Generator[None, None, None]

_ASK_AGAIN_S = 0.001


class LoadFailed(KvferryError):
    """A load that did not become good: the blocks hold nothing that may be used."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What a good load moved, and how long it took.

    Attributes:
        planned_bytes: by the plan: descriptors × their length.
        transferred_bytes, descriptors: as NIXL counted them.
        post_s, transfer_s: as NIXL measured them, summed over the routes.
        load_s: from the order to the last byte.
        staged_bytes, waves: of the planned bytes those that went through the staging pool, and in how many waves.
    """

    planned_bytes: int
    transferred_bytes: int
    descriptors: int
    post_s: float
    transfer_s: float
    load_s: float
    staged_bytes: int = 0
    waves: int = 0


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What every load of a worker works with.

    Attributes:
        groups: this engine's cache groups.
        boot: this engine's boot, for the producer's count of reporters.
        worker: this worker's index in its engine.
    """

    fabric: Fabric
    book: PeerBook
    landing: Landing
    staging: Staging | None
    caches: KvCaches
    eraser: TailEraser
    groups: tuple[CacheGroup, ...]
    boot: str
    worker: int


@dataclass(slots=True)
class Load:
    """One load.

    Attributes:
        mark: when it is reached, the device has finished everything that was launched before the blocks were given
            to this request.
        peer: whom it reads from, once that has been met.
        in_flight: transfers that may still write: into the request's blocks, or into `cells`.
        staged: what goes through the staging pool, and may still write too.
        erased: when the device has zeroed what was not loaded; until then it may still write as well.
        figures: set when the load is good.
        undelivered: producer workers that could not be told.
    """

    order: LoadOrder
    mark: DeviceMark
    context: LoadContext
    ordered_s: float
    peer: Peer | None = None
    in_flight: list[Transfer] = field(default_factory=list)
    staged: StagedReads | None = None
    erased: DeviceMark | None = None
    cells: tuple[int, ...] = ()
    figures: LoadFigures | None = None
    undelivered: int = 0

    @property
    def key(self) -> PeerKey:
        return PeerKey.of(self.order.source)

    def steps(self) -> Steps:
        """The load's life.

        Raises:
            LoadFailed: the blocks are not to be used.
            FabricError: the fabric failed; the peer may be lost.
        """
        peer = self.peer = yield from self._meet_peer()
        units = self._pair_units(peer)
        while not self.mark.reached():
            yield
        yield from self._check_fence(peer, wait_until_ready=True)
        planned, handles = self._post_reads(peer, units)
        yield from self._read_staged(peer, units)
        yield from self._finish(handles)
        self.erased = self.context.eraser.erase(units, self.context.groups, self._blocks)
        yield from self._check_fence(peer, wait_until_ready=False)
        while self.erased is not None and not self.erased.reached():
            yield
        self.figures = self._figures(planned, handles)
        self._tell(peer)

    def settle(self) -> bool:
        """Release what can write no more; raises nothing, unless the device itself has failed.

        Returns:
            Whether nothing is in flight: the blocks are safe to use again.
        """
        fabric = self.context.fabric
        ended = [transfer for transfer in self.in_flight if has_ended(fabric, transfer)]
        for transfer in ended:
            self.in_flight.remove(transfer)
            give_back(fabric, transfer)
        if not self.in_flight and self.cells:
            self.context.landing.give_back(self.cells)
            self.cells = ()
        staged_is_safe = self.staged is None or self.staged.settle()
        is_erased = self.erased is None or self.erased.reached()
        return not self.in_flight and staged_is_safe and is_erased

    def _meet_peer(self) -> Generator[None, None, Peer]:
        while True:
            found = self.context.book.get(self.key, time.monotonic())
            if isinstance(found, Peer):
                try:
                    check_seal(self.order.source, found.description.seal_key)
                except InvalidParams as invalid:
                    raise LoadFailed(FailureReason.SEAL, str(invalid)) from None
                return found
            if isinstance(found, Unavailable):
                raise LoadFailed(found.reason, found.text)
            yield

    def _pair_units(self, peer: Peer) -> dict[TokenMap, UnitPairs]:
        source, groups = self.order.source, self.context.groups
        if not len(source.remote_block_ids) == len(self.order.local_blocks) == len(groups):
            text = f"{len(source.remote_block_ids)} groups of blocks; expected {len(groups)}"
            raise LoadFailed(FailureReason.PARAMS, text)
        slot = source.kvferry.lease_slot
        if any(slot >= route.num_slots for route in peer.routes):
            raise LoadFailed(FailureReason.PARAMS, f"lease_slot is {slot}; the producer has fewer")
        try:
            return pair_request(peer.plan, groups, peer.description.groups, self._blocks)
        except InvalidParams as invalid:
            raise LoadFailed(FailureReason.PARAMS, str(invalid)) from None

    @property
    def _blocks(self) -> RequestBlocks:
        source, order = self.order.source, self.order
        return RequestBlocks(
            local=order.local_blocks,
            remote=source.remote_block_ids,
            first_token=order.first_token,
            stop_token=order.stop_token,
            num_tokens=source.remote_num_tokens,
        )

    def _check_fence(self, peer: Peer, *, wait_until_ready: bool) -> Steps:
        """Read the lease's slot on every producer worker: only `epoch | READY` on all of them is good.

        Before the data, a slot that still says COMPUTING is asked again.
        """
        ticket = self.order.source.kvferry
        epoch = epoch_from_text(ticket.lease_epoch)
        ready, computing = (slot_word(epoch, state) for state in (SlotState.READY, SlotState.COMPUTING))
        if not peer.routes:
            return  # this worker holds nothing of the model's caches, and nobody has to be told
        yield from self._take_cells(len(peer.routes))
        words = self.context.landing.words
        slot = np.array([ticket.lease_slot], dtype=np.int32)
        while True:
            handles = []
            for cell, route in zip(self.cells, peer.routes, strict=True):
                words[cell] = 0
                where = np.array([cell], dtype=np.int32)
                handles.append(self._post(self.context.landing.descriptors, where, route.slots, slot))
            yield from self._finish(handles)
            self._release(handles)
            found = {int(words[cell]) for cell in self.cells}
            if found == {ready}:
                return
            if not (wait_until_ready and found <= {ready, computing}):
                when = "before" if wait_until_ready else "after"
                raise LoadFailed(FailureReason.FENCE, f"the lease had ended {when} the read")
            again_s = time.monotonic() + _ASK_AGAIN_S
            while time.monotonic() < again_s:
                yield

    def _take_cells(self, count: int) -> Steps:
        if count > len(self.context.landing.words):
            raise LoadFailed(FailureReason.PLAN, f"{count} producer workers; expected at most as many as cells land")
        while not self.cells:
            taken = self.context.landing.try_take(count)
            if taken is not None:
                self.cells = taken
                return
            yield

    def _post_reads(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> tuple[int, list[Transfer]]:
        planned = 0
        handles = []
        for prepared in (prepared for route in peer.routes for prepared in route.tables):
            wanted = descriptor_pairs(prepared.table, units)
            if len(wanted.local):
                handles.append(self._post(prepared.local, wanted.local, prepared.remote, wanted.remote))
                planned += wanted.num_bytes
        return planned, handles

    def _read_staged(self, peer: Peer, units: Mapping[TokenMap, UnitPairs]) -> Steps:
        sources = [
            (source, source_units(source.table.source, units[source.table.source.tokens]))
            for route in peer.routes
            for source in route.sources
        ]
        if sources and self.context.staging is not None:
            peer_name = f"{peer.key}/{peer.key.boot}"
            reads = StagedReads(self.context.fabric, self.context.staging, self.order.request_id, peer_name)
            self.staged = reads
            yield from reads.steps(sources)

    def _post(self, *read: object) -> Transfer:
        transfer = self.context.fabric.post_read(*read)  # type: ignore[arg-type]
        self.in_flight.append(transfer)
        return transfer

    def _finish(self, handles: list[Transfer]) -> Steps:
        """Until all of them are done. A transfer that raises ends the load; its siblings stay in `in_flight`."""
        waiting = list(handles)
        while True:
            waiting = [x for x in waiting if self.context.fabric.poll(x) is TransferState.IN_FLIGHT]
            if not waiting:
                return
            yield

    def _release(self, handles: list[Transfer]) -> None:
        for transfer in handles:
            self.in_flight.remove(transfer)
            self.context.fabric.release(transfer)

    def _figures(self, planned: int, handles: list[Transfer]) -> LoadFigures:
        told = [self.context.fabric.telemetry(transfer) for transfer in handles]
        known = [one for one in told if one is not None]
        self._release(handles)
        staged = self.staged.figures if self.staged is not None else StagedFigures()
        known += staged.telemetry
        return LoadFigures(
            planned_bytes=planned + staged.planned_bytes,
            transferred_bytes=sum(one.bytes for one in known),
            descriptors=sum(one.descriptors for one in known),
            post_s=sum(one.post_us for one in known) / 1e6,
            transfer_s=sum(one.transfer_us for one in known) / 1e6,
            load_s=time.monotonic() - self.ordered_s,
            staged_bytes=staged.planned_bytes,
            waves=staged.waves,
        )

    def _tell(self, peer: Peer) -> None:
        """Tell every producer worker that this worker needs nothing more under the lease."""
        ticket = self.order.source.kvferry
        for route in peer.routes:
            message = Done(
                slot=ticket.lease_slot,
                epoch=ticket.lease_epoch,
                consumer=self.context.boot,
                worker=self.context.worker,
                expected=route.route.expected,
            )
            try:
                self.context.fabric.notify(route.agent, encode_notification(message))
            except FabricError:
                self.undelivered += 1  # the producer will free the blocks when their lease runs out
