"""A load of a prompt that is read while it is computed.

It reads the slot, then the ids of the blocks that are complete, then the blocks, and waits for more. Windows, chunks
and states are read when the prompt is complete, with its last part. If the producer preempts the prompt, its lease goes
on under another epoch: the row's header names it beside the first one, which the ticket has, and the load begins anew.
Whatever it reads may be wrong or change meanwhile: only the last fence, READY under the epoch that the load follows,
makes the bytes count.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from kvferry.plan.blocks import RequestBlocks, UnitPairs
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.ids import EMPTY, Epoch, SlotState, epoch_from_text
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.stream_rows import header_word
from kvferry.worker.loads.context import LoadFailed
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.slot_watch import SlotWords, Wait, complete_tokens
from kvferry.worker.loads.streamed_blocks import StreamedBlocks
from kvferry.worker.peers.peer import Peer, PreparedRows

_MOST_CHUNKS = 64
_grows = operator.attrgetter("holds_every_token")


@dataclass(slots=True, eq=False)
class StreamedLoad(Load):
    """See the module.

    Attributes:
        rows: of the producer workers, in the order of the peer's routes.
        blocks: what is known of the prompt's blocks.
        held: leading tokens that are complete and whose blocks are known.
    """

    rows: list[PreparedRows] = field(default_factory=list)
    blocks: StreamedBlocks | None = None
    held: int = 0

    def _prepare(self, peer: Peer) -> dict[TokenMap, UnitPairs]:
        self._check_params(peer)
        self.rows = [route.rows for route in peer.routes if route.rows is not None]
        if len(self.rows) < len(peer.routes) or any(
            self._row >= rows.rows.rows for rows in self.rows
        ):
            text = f"stream_row is {self._row}; a worker of the producer has no such row"
            raise LoadFailed(FailureReason.PARAMS, text)
        if self.rows:
            groups, source = peer.description.groups, self.order.source
            tokens, held_from = source.remote_num_tokens, source.kvferry.held_from
            try:
                self.blocks = StreamedBlocks(
                    self.rows[0].rows, self._row, peer.plan, groups, tokens, held_from
                )
            except InvalidParams as invalid:
                raise LoadFailed(FailureReason.PARAMS, str(invalid)) from None
        return {}

    @property
    def _row(self) -> int:
        return self.order.source.kvferry.stream_row or 0

    @property
    def _blocks(self) -> RequestBlocks:
        return self._part(self.order.first_token, self.order.stop_token)

    def _part(self, first: int, stop: int) -> RequestBlocks:
        """The part of the load from one token to another, which is complete."""
        local = self.order.local_blocks
        remote = self.blocks.ids(self.held) if self.blocks is not None else [[] for _ in local]
        return RequestBlocks(
            local=local, remote=remote, first_token=first, stop_token=stop, num_tokens=self.held
        )

    def _read(
        self, peer: Peer, units: dict[TokenMap, UnitPairs]
    ) -> Generator[Wait | None, None, dict[TokenMap, UnitPairs]]:
        if self.blocks is None:
            return units  # this worker reads nothing from any
        done, opens_until_s, is_whole = self.order.first_token, self._opens_until_s, True
        words = yield from self._slots(peer)
        while True:
            complete = complete_tokens(words, self.epoch, self.order.source.remote_num_tokens)
            if complete is None:
                if (yield from self._follow(words, opens_until_s)):
                    done = self.order.first_token
                    words = yield from self._slots(peer)
                    continue
                soon_s = opens_until_s if self.looked_s < opens_until_s else -math.inf
                words = yield from self._wait(peer, words, soon_s)
                continue
            opens_until_s, is_ready, held = (
                -math.inf,
                self._is_ready(words),
                self.blocks.whole(complete),
            )
            stop = min(held, self.order.stop_token)
            if (stop > done and self.blocks.grows) or (is_ready and self.blocks.has_ends):
                units = yield from self._read_chunk(
                    peer, self.blocks, done, held, is_ready=is_ready
                )
                is_whole, done = done == self.order.first_token, stop
            if is_ready:
                return units if is_whole else self._pair_units(peer, self._blocks)
            words = yield from self._wait(peer, words, math.inf)

    def _is_ready(self, words: SlotWords) -> bool:
        return all(state == self._word(SlotState.READY) for state, _ in words)

    def _read_chunk(
        self, peer: Peer, blocks: StreamedBlocks, first: int, held: int, *, is_ready: bool
    ) -> Generator[Wait | None, None, dict[TokenMap, UnitPairs]]:
        """Read the ids that are new, and the tokens from `first` on, since `held` are complete; if all are, also the
        windows, chunks and states."""
        record, begun_s, before = self.record, time.monotonic(), self.record.planned_bytes
        self.turn = peer.data_reads.turn
        pages = yield from self.lease_reads.ids(
            self.rows[0], self._row, blocks.missing(held, is_ready=is_ready)
        )
        blocks.take(held, pages, is_ready=is_ready)
        self.held, stop = held, min(held, self.order.stop_token)
        units = self._pair_units(peer, self._part(first, stop), _grows)
        if is_ready and blocks.has_ends:
            ends = self._pair_units(peer, self._blocks, lambda group: not _grows(group))
            units |= {tokens: pairs for tokens, pairs in ends.items() if len(pairs)}
        yield from self._read_units(peer, units)
        self.changes += 1
        if not is_ready:
            record.early_bytes += record.planned_bytes - before
        if len(record.chunks) == _MOST_CHUNKS:
            begun_s = record.chunks[-1][1]
        record.chunks = (*record.chunks[: _MOST_CHUNKS - 1], (stop, begun_s, time.monotonic()))
        return units

    def _follow(self, words: SlotWords, opens_until_s: float) -> Generator[None, None, bool]:
        """The slot of a worker is not under the epoch that is followed: follow another one of the same lease, if all
        workers name it. Returns whether it does; False while that may still come.

        Raises:
            LoadFailed: the lease is over.
        """
        origin = header_word(epoch_from_text(self.order.source.kvferry.lease_epoch))
        headers = yield from self.lease_reads.headers(self.rows, self._row)
        if any(first != origin for first, _ in headers) or EMPTY in (state for state, _ in words):
            if self.looked_s >= opens_until_s:
                raise LoadFailed(
                    FailureReason.FENCE, "the lease had ended while the prompt was read"
                )
            return False
        present = {present for _, present in headers}
        found = present.pop()
        if present or found in (header_word(self.epoch), EMPTY):
            return False
        self.epoch, self.held = Epoch(found >> 4), 0
        if self.blocks is not None:
            self.blocks.forget()
        self.record.restarts += 1
        self.changes += 1
        return True
