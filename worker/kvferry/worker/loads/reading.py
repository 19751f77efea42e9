"""How a load reads: a whole prompt at once, or part by part while it is computed. A `Load` has one of the two."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvferry.plan.blocks import RequestBlocks, UnitPairs, Wanted, every, pair_request
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.ids import EMPTY, Epoch, epoch_from_text
from kvferry.protocol.orders import FailureReason, LoadOrder
from kvferry.protocol.stream_rows import header_word
from kvferry.worker.loads.data_reads import DataReads
from kvferry.worker.loads.fence import LeaseFence, LeaseReads
from kvferry.worker.loads.results import LoadRecord
from kvferry.worker.loads.slot_watch import SlotWords, Wait, complete_tokens
from kvferry.worker.loads.state import LoadFailed, Progress
from kvferry.worker.loads.streamed_blocks import StreamedBlocks
from kvferry.worker.peers.peer import Peer, PreparedRows

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
        self, peer: Peer, blocks: RequestBlocks, wanted: Wanted = every
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


class StreamedRead:
    """Reads a prompt part by part while it is computed.

    It reads the slot, then the ids of the blocks that are complete, then the blocks, and waits for more. Windows,
    chunks and states are read with the last part, when the prompt is complete. If the producer preempts the prompt, its
    lease goes on under another epoch: the row's header names it beside the first one, which the ticket has, and the
    reading begins anew.

    Whatever it reads may be wrong, or change meanwhile. Only the last fence makes the bytes count: READY under the
    epoch that the reading follows.

    Attributes:
        held: leading tokens that are complete and whose block ids are known.
        listed: what is known of the prompt's blocks; None if this worker reads nothing from any.
    """

    __slots__ = ("_parts", "_row", "_rows", "held", "listed")

    def __init__(self, parts: LoadParts) -> None:
        self.held = 0
        self.listed: StreamedBlocks | None = None
        self._parts = parts
        self._rows: list[PreparedRows] = []
        self._row = parts.order.source.kvferry.stream_row or 0

    @property
    def blocks(self) -> RequestBlocks:
        return self._blocks_of(
            self._parts.order.first_token, self._parts.order.stop_token
        )

    def prepare(self, peer: Peer) -> None:
        # Ticket and description are the producer's word: a row that it does not have is refused before any read.
        self._rows = [route.rows for route in peer.routes if route.rows is not None]
        every_route_has_rows = len(self._rows) == len(peer.routes)
        if not every_route_has_rows or any(
            self._row >= rows.rows.rows for rows in self._rows
        ):
            text = (
                f"stream_row is {self._row}; a worker of the producer has no such row"
            )
            raise LoadFailed(FailureReason.PARAMS, text)
        if not self._rows:
            return
        source = self._parts.order.source
        try:
            self.listed = StreamedBlocks(
                self._rows[0].rows,
                self._row,
                peer.plan,
                peer.description.groups,
                source.remote_num_tokens,
                source.kvferry.held_from,
            )
        except InvalidParams as invalid:
            raise LoadFailed(FailureReason.PARAMS, str(invalid)) from None

    def steps(self, peer: Peer) -> ReadSteps:
        listed = self.listed
        if listed is None:
            return {}
        fence = self._parts.fence
        order = self._parts.order
        done = order.first_token
        is_one_chunk = True
        has_opened = False
        units: Units = {}
        words = yield from fence.read_slot(peer)
        # Slots and rows may say anything, and change at any time; a producer that changes them for ever is ended by the
        # load's longest deadline.
        while True:
            complete = complete_tokens(
                words, fence.epoch, order.source.remote_num_tokens
            )
            if complete is None:
                may_open_late = not has_opened and fence.read_s < fence.opens_until_s
                if (yield from self._follow_epoch(words, may_open_late=may_open_late)):
                    done = order.first_token
                    # A read may end with its post, and a producer may name new epochs for ever: without a pause here
                    # the transfer thread would follow them and do nothing else, not even judge the deadline.
                    yield None
                    words = yield from fence.read_slot(peer)
                    continue
                # The next reading of the slot decides; it need not find other words.
                until_s = fence.opens_until_s if may_open_late else -math.inf
                words = yield from fence.wait_for_change(peer, words, until_s)
                continue
            has_opened = True
            is_ready = fence.is_ready(words)
            held = listed.whole(complete)
            # A prompt may be longer than what is loaded of it: the rest is not read.
            stop = min(held, order.stop_token)
            has_new_tokens = stop > done and listed.grows
            has_ends = is_ready and listed.has_ends
            if has_new_tokens or has_ends:
                units = yield from self._read_chunk(
                    peer, listed, done, held, is_ready=is_ready
                )
                is_one_chunk = done == order.first_token
                done = stop
            if is_ready:
                # `units` has only those of the last chunk; the zeroing needs all of them.
                if is_one_chunk:
                    return units
                return self._parts.pair_units(peer, self.blocks)
            words = yield from fence.wait_for_change(peer, words, math.inf)

    def _blocks_of(self, first_token: int, stop_token: int) -> RequestBlocks:
        """A part of what is loaded. All of it is complete."""
        local = self._parts.order.local_blocks
        if self.listed is None:
            remote: list[list[int]] = [[] for _ in local]
        else:
            remote = self.listed.ids(self.held)
        return RequestBlocks(
            local=local,
            remote=remote,
            first_token=first_token,
            stop_token=stop_token,
            num_tokens=self.held,
        )

    def _read_chunk(
        self,
        peer: Peer,
        listed: StreamedBlocks,
        first_token: int,
        held: int,
        *,
        is_ready: bool,
    ) -> ReadSteps:
        """Read the block ids that are new, and then the tokens from `first_token` on.

        Args:
            held: the leading tokens that are complete now.
            is_ready: all are; then windows, chunks and states are read too.
        """
        parts = self._parts
        begun_s = time.monotonic()
        planned_before = parts.record.planned_bytes
        parts.progress.turn = peer.data_reads.turn
        missing = listed.missing(held, is_ready=is_ready)
        # From the first worker alone: a row has the scheduler's block ids, which are the same on all of them.
        pages = yield from parts.lease_reads.ids(self._rows[0], self._row, missing)
        listed.take(held, pages, is_ready=is_ready)
        self.held = held
        stop = min(held, parts.order.stop_token)
        units = parts.pair_units(peer, self._blocks_of(first_token, stop), _grows)
        if is_ready and listed.has_ends:
            ends = parts.pair_units(peer, self.blocks, _has_only_ends)
            units |= {tokens: pairs for tokens, pairs in ends.items() if len(pairs)}
        yield from parts.data.steps(peer, units)
        parts.progress.changes += 1
        # Read before the prefill had ended: what streaming is worth.
        if not is_ready:
            parts.record.early_bytes += parts.record.planned_bytes - planned_before
        parts.record.add_chunk(stop, begun_s, time.monotonic())
        return units

    def _follow_epoch(
        self, words: SlotWords, *, may_open_late: bool
    ) -> Generator[None, None, bool]:
        """The slot of a worker is not under the epoch that is followed. Follow another one of the same lease, if all
        workers name it.

        Args:
            may_open_late: the producer may open the slot later.

        Returns:
            Whether another epoch is followed now; False while one may still come.

        Raises:
            LoadFailed: the lease is over, or the headers name no epoch.
            FabricError: the headers cannot be read.
        """
        fence = self._parts.fence
        origin = header_word(
            epoch_from_text(self._parts.order.source.kvferry.lease_epoch)
        )
        headers = yield from self._parts.lease_reads.headers(self._rows, self._row)
        is_another_lease = any(header_origin != origin for header_origin, _ in headers)
        has_empty_slot = any(state == EMPTY for state, _ in words)
        if is_another_lease or has_empty_slot:
            if not may_open_late:
                raise LoadFailed(
                    FailureReason.FENCE, "the lease had ended while the prompt was read"
                )
            return False
        named = {header_epoch for _, header_epoch in headers}
        if len(named) > 1:
            # The workers carry out the step that preempts the prompt one after the other.
            return False
        header_epoch = named.pop()
        if header_epoch in (header_word(fence.epoch), EMPTY):
            return False
        epoch = Epoch(header_epoch >> 4)
        # No producer writes such a word, and following it would begin anew with every look: it equals no epoch's.
        if header_word(epoch) != header_epoch:
            text = f"the row's header is {header_epoch:#x}, which names no epoch"
            raise LoadFailed(FailureReason.FENCE, text)
        # What was read of the blocks before may have been given away in the step that preempted the prompt, so nothing
        # of it is kept. The former epoch never becomes READY.
        fence.epoch = epoch
        self.held = 0
        if self.listed is not None:
            self.listed.forget()
        self._parts.record.restarts += 1
        self._parts.progress.changes += 1
        return True


def _grows(group: CacheGroup) -> bool:
    """Whether blocks of this group are listed while the prompt is computed."""
    return group.holds_every_token


def _has_only_ends(group: CacheGroup) -> bool:
    """Whether blocks of this group are listed when the prompt is complete."""
    return not group.holds_every_token
