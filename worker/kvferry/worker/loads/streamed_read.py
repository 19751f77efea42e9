"""A prompt that is read while it is computed: the blocks that its row lists, and how a load reads them part by part.

Groups that hold every token grow with the prompt. Of windows, chunks and states the last blocks are listed, those from
the ticket's `held_from` on, once it is complete.

What a peer's slots and rows say can be any number: nothing here depends on it, and `pair_request` checks the ids.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from kvferry.plan.blocks import RequestBlocks, Wanted, pair_request
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.ids import Epoch
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import (
    EMPTY,
    PAGE_IDS,
    StreamRows,
    epoch_from_text,
    header_word,
)
from kvferry.worker.fabric.reads import SlotWords
from kvferry.worker.loads.load import LoadParts, ReadSteps, Units
from kvferry.worker.loads.slot_watch import complete_tokens
from kvferry.worker.loads.state import LoadFailed
from kvferry.worker.peers.peer import Peer, PreparedRows


class StreamedBlocks:
    """The ids of one prompt's blocks, as far as they have been read.

    Args:
        plan: by which this worker reads.
        groups: the producer's.
        num_tokens: of the whole prompt.
        held_from: per cache group the first token whose block is listed; `()` for 0.

    Raises:
        InvalidParams: the producer's workers have no such row, or it has no room for the prompt.
    """

    def __init__(
        self,
        rows: StreamRows,
        row: int,
        plan: TransferPlan,
        groups: Sequence[CacheGroup],
        num_tokens: int,
        held_from: Sequence[int] = (),
    ) -> None:
        self._spans = _spans(plan, groups)
        # Padded: a ticket lists no first token for groups whose blocks are all listed.
        self._held_from = [*held_from, *[0] * len(groups)]
        self._num_tokens = num_tokens
        # Where each group's ids begin in the row, and where the last one's end.
        self._first_ids = tuple(itertools.accumulate(rows.blocks, initial=0))
        if row >= rows.rows:
            raise InvalidParams("kvferry.stream_row", row, f"a row below {rows.rows}")
        if len(rows.blocks) != len(groups):
            raise InvalidParams(
                "kvferry.stream_row", row, f"{len(rows.blocks)} cache groups"
            )
        self._growing = {
            index for index, group in enumerate(groups) if group.holds_every_token
        }
        counts = self._counts(num_tokens, is_ready=True)
        if any(count > room for count, room in zip(counts, rows.blocks, strict=True)):
            raise InvalidParams(
                "remote_num_tokens", num_tokens, f"as many as {rows.blocks} blocks hold"
            )
        self._whole_tokens = self._least_whole_tokens(plan)
        self.forget()

    @property
    def grows(self) -> bool:
        """Whether there is something to read before the prompt is complete."""
        return not self._growing.isdisjoint(self._spans)

    @property
    def has_ends(self) -> bool:
        """Whether there is something to read that is listed once the prompt is complete."""
        return not self._growing >= self._spans.keys()

    def forget(self) -> None:
        """Forget all ids: the prompt is computed again."""
        self._ids = [np.zeros(0, dtype=np.int64) for _ in self._first_ids[1:]]

    def whole(self, tokens: int) -> int:
        """How many of the leading tokens fill whole blocks of every producer worker; the whole prompt does."""
        if tokens == self._num_tokens:
            return tokens
        return tokens // self._whole_tokens * self._whole_tokens

    def missing(self, held: int, *, is_ready: bool) -> list[int]:
        """The pages of the row that list the blocks of `held` tokens, apart from those that have been taken.

        Args:
            is_ready: whether the prompt is complete, and everything is listed.
        """
        pages: set[int] = set()
        for begin, stop in self._bounds(held, is_ready=is_ready):
            pages.update(_pages(begin, stop))
        return sorted(pages)

    def take(
        self, held: int, pages: Mapping[int, np.ndarray], *, is_ready: bool
    ) -> None:
        """Take the ids of the blocks of `held` tokens from the `missing` pages."""
        for group, (begin, stop) in enumerate(self._bounds(held, is_ready=is_ready)):
            if begin >= stop:
                continue
            wanted = _pages(begin, stop)
            listed = np.concatenate([pages[page] for page in wanted])
            first_listed = wanted.start * PAGE_IDS
            new = listed[begin - first_listed : stop - first_listed]
            self._ids[group] = np.concatenate([self._ids[group], new.astype(np.int64)])

    def ids(self, held: int) -> list[list[int]]:
        """Per cache group the blocks of `held` tokens, as far as they have been taken."""
        counts = self._counts(held, is_ready=True)
        return [
            ids[:count].tolist() for ids, count in zip(self._ids, counts, strict=True)
        ]

    def _bounds(self, held: int, *, is_ready: bool) -> list[tuple[int, int]]:
        """Per cache group the part `[begin, stop)` of the row that lists blocks that have not been taken."""
        counts = self._counts(held, is_ready=is_ready)
        firsts = self._first_ids[:-1]
        return [
            (first + len(ids), first + count)
            for first, ids, count in zip(firsts, self._ids, counts, strict=True)
        ]

    def _counts(self, held: int, *, is_ready: bool) -> list[int]:
        """Per cache group the listed blocks of so many tokens; 0 for groups that this worker does not read, or not
        yet."""
        counts = [0] * (len(self._first_ids) - 1)
        for group in self._spans:
            if is_ready or group in self._growing:
                counts[group] = self._count(group, held)
        return counts

    def _count(self, group: int, held: int) -> int:
        """The blocks of so many tokens, without those before the first one that is listed."""
        span = self._spans[group]
        not_listed = self._held_from[group] // span
        return max(0, -(-held // span) - not_listed)

    def _least_whole_tokens(self, plan: TransferPlan) -> int:
        """Multiples of so many leading tokens fill whole blocks of every growing group, and whole runs of every rank
        that divides them: then each producer worker has written all of them."""
        tokens = [span for group, span in self._spans.items() if group in self._growing]
        for route in plan.routes:
            for bundle in route.bundles:
                share = bundle.tokens.remote.share
                if bundle.tokens.group in self._growing:
                    tokens.append(share.run_tokens * share.ranks)
        return math.lcm(*tokens)


def _pages(begin: int, stop: int) -> range:
    """The pages that list the ids `[begin, stop)` of a row."""
    if begin >= stop:
        return range(0)
    return range(begin // PAGE_IDS, -(-stop // PAGE_IDS))


def _spans(plan: TransferPlan, groups: Sequence[CacheGroup]) -> dict[int, int]:
    """By cache group that is read the tokens of one block, on all producer workers that divide them."""
    spans: dict[int, int] = {}
    for route in plan.routes:
        for bundle in route.bundles:
            group = bundle.tokens.group
            span = groups[group].block_tokens * bundle.tokens.remote.share.ranks
            # A row lists the ids of a group once, for all its tensors.
            if spans.setdefault(group, span) != span:
                raise InvalidParams(
                    "kvferry.stream_row",
                    span,
                    f"blocks of {spans[group]} tokens in all tensors",
                )
    return spans


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
        listed: what is known of the prompt's blocks; None for a worker that has no caches, and so reads from nobody.
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
        self.listed = StreamedBlocks(
            self._rows[0].rows,
            self._row,
            peer.plan,
            peer.description.groups,
            source.remote_num_tokens,
            source.kvferry.held_from,
        )

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
                return self._pair_units(peer, self.blocks)
            words = yield from fence.wait_for_change(peer, words, math.inf)

    def _pair_units(
        self, peer: Peer, blocks: RequestBlocks, wanted: Wanted | None = None
    ) -> Units:
        """The units of these blocks on both sides, of the wanted cache groups.

        Raises:
            InvalidParams: the producer's blocks do not fit.
        """
        return pair_request(
            peer.plan,
            self._parts.groups,
            peer.description.groups,
            blocks,
            wanted=wanted,
        )

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
        parts.progress.turn = peer.data_reads.entered
        missing = listed.missing(held, is_ready=is_ready)
        # From the first worker alone: a row has the scheduler's block ids, which are the same on all of them.
        rows = self._rows[0]
        first_page = self._row * rows.rows.pages
        pages = yield from parts.lease_reads.ids(rows.pages, first_page, missing)
        listed.take(held, pages, is_ready=is_ready)
        self.held = held
        stop = min(held, parts.order.stop_token)
        units = self._pair_units(peer, self._blocks_of(first_token, stop), _grows)
        if is_ready and listed.has_ends:
            ends = self._pair_units(peer, self.blocks, _has_only_ends)
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
        header_entries = [rows.headers for rows in self._rows]
        headers = yield from self._parts.lease_reads.words(header_entries, self._row)
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
