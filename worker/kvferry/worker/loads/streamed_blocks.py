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
