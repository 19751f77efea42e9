"""The blocks of a prompt that is being computed, as its row lists them.

Groups that hold every token grow with the prompt. Of windows, chunks and states the last blocks are listed, those from
the ticket's `held_from` on, once it is complete.

What a peer's slots and rows say can be any number: nothing here depends on it, and `pair_request` checks the ids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.stream_rows import PAGE_IDS, StreamRows


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
        self._held_from = [*held_from, *[0] * len(groups)]
        self._num_tokens = num_tokens
        self._first_ids = tuple(itertools.accumulate(rows.blocks, initial=0))
        if row >= rows.rows:
            raise InvalidParams("kvferry.stream_row", row, f"a row below {rows.rows}")
        if len(rows.blocks) != len(groups):
            raise InvalidParams("kvferry.stream_row", row, f"{len(rows.blocks)} cache groups")
        self._growing = {index for index, group in enumerate(groups) if group.holds_every_token}
        counts = self._counts(num_tokens, is_ready=True)
        if any(count > most for count, most in zip(counts, rows.blocks, strict=True)):
            raise InvalidParams(
                "remote_num_tokens", num_tokens, f"as many as {rows.blocks} blocks hold"
            )
        maps = (bundle.tokens for route in plan.routes for bundle in route.bundles)
        runs = (tokens.remote.share for tokens in maps if tokens.group in self._growing)
        spans = (span for group, span in self._spans.items() if group in self._growing)
        self._step = math.lcm(*spans, *(share.run_tokens * share.ranks for share in runs))
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
        return tokens if tokens == self._num_tokens else tokens // self._step * self._step

    def missing(self, held: int, *, is_ready: bool) -> list[int]:
        """The pages of the row that list the blocks of `held` tokens, apart from those that have been taken.

        Args:
            is_ready: whether the prompt is complete, and everything is listed.
        """
        wanted = (_pages(*bounds) for bounds in self._bounds(held, is_ready=is_ready))
        return sorted({page for pages in wanted for page in pages})

    def take(self, held: int, pages: Mapping[int, np.ndarray], *, is_ready: bool) -> None:
        """Take the ids of the blocks of `held` tokens from the `missing` pages."""
        for group, (begin, stop) in enumerate(self._bounds(held, is_ready=is_ready)):
            if begin < stop:
                wanted = _pages(begin, stop)
                listed = np.concatenate([pages[page] for page in wanted])[
                    : stop - wanted.start * PAGE_IDS
                ]
                new = listed[begin - wanted.start * PAGE_IDS :]
                self._ids[group] = np.concatenate([self._ids[group], new.astype(np.int64)])

    def ids(self, held: int) -> list[list[int]]:
        """Per cache group the blocks of `held` tokens, as far as they have been taken."""
        return [
            ids[:count].tolist()
            for ids, count in zip(self._ids, self._counts(held, is_ready=True), strict=True)
        ]

    def _bounds(self, held: int, *, is_ready: bool) -> list[tuple[int, int]]:
        """Per cache group the part `[begin, stop)` of the row that lists blocks that have not been taken."""
        firsts, counts = self._first_ids[:-1], self._counts(held, is_ready=is_ready)
        return [
            (first + len(ids), first + count)
            for first, ids, count in zip(firsts, self._ids, counts, strict=True)
        ]

    def _counts(self, held: int, *, is_ready: bool) -> list[int]:
        """Per cache group the listed blocks of so many tokens; 0 for groups that this worker does not read, or not
        yet."""
        listed = self._spans if is_ready else self._spans.keys() & self._growing
        return [
            self._count(group, held) if group in listed else 0
            for group in range(len(self._first_ids) - 1)
        ]

    def _count(self, group: int, held: int) -> int:
        span = self._spans[group]
        return max(0, -(-held // span) - self._held_from[group] // span)


def _pages(begin: int, stop: int) -> range:
    return range(begin // PAGE_IDS, -(-stop // PAGE_IDS)) if begin < stop else range(0)


def _spans(plan: TransferPlan, groups: Sequence[CacheGroup]) -> dict[int, int]:
    """By cache group that is read the tokens of one block, on all producer workers that divide them."""
    spans: dict[int, int] = {}
    for tokens in (bundle.tokens for route in plan.routes for bundle in route.bundles):
        span = groups[tokens.group].block_tokens * tokens.remote.share.ranks
        if spans.setdefault(tokens.group, span) != span:
            raise InvalidParams(
                "kvferry.stream_row", span, f"blocks of {spans[tokens.group]} tokens in all tensors"
            )
    return spans
