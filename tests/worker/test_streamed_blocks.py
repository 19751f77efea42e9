"""The blocks of a streamed prompt: which pages list them, and that nothing that a row says breaks anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.geometry import Interleave
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.ids import (
    Epoch,
)
from kvferry.protocol.slots import (
    MAX_PROGRESS,
    PAGE_IDS,
    SlotState,
    StreamRows,
    progress_word,
    slot_word,
)
from kvferry.worker.loads.slot_watch import complete_tokens
from kvferry.worker.loads.streamed_read import StreamedBlocks

EPOCH, OTHER = Epoch(0x123456789ABCDE), Epoch(0x23456789ABCDEF)
READY, COMPUTING = (
    slot_word(EPOCH, SlotState.READY),
    slot_word(EPOCH, SlotState.COMPUTING),
)
BIG = 2**64 - 1


def plan_of(*shares: tuple[int, Interleave]) -> TransferPlan:
    """The part of a plan that counts: per bundle its group, and the producer's share."""
    bundles = [
        SimpleNamespace(
            tokens=SimpleNamespace(group=group, remote=SimpleNamespace(share=share))
        )
        for group, share in shares
    ]
    return cast(
        "TransferPlan", SimpleNamespace(routes=[SimpleNamespace(bundles=bundles)])
    )


def groups_of(*block_tokens: int) -> list[CacheGroup]:
    return [CacheGroup(policy="full", block_tokens=count) for count in block_tokens]


WINDOW = CacheGroup(policy="window", block_tokens=4, window_tokens=8)


def rows_of(*blocks: int, rows: int = 4) -> StreamRows:
    return StreamRows(headers=0, ids=0, rows=rows, blocks=blocks)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (((READY, 0), (READY, 5)), 100),
        (((READY, 0), (COMPUTING, progress_word(EPOCH, 40))), 40),
        (
            (
                (COMPUTING, progress_word(EPOCH, 64)),
                (COMPUTING, progress_word(EPOCH, 40)),
            ),
            40,
        ),
        (((COMPUTING, progress_word(OTHER, 64)),), 0),
        (((COMPUTING, progress_word(EPOCH, MAX_PROGRESS)),), 100),
        (((COMPUTING, 0),), 0),
        (((READY, 0), (0, 0)), None),
        (((slot_word(OTHER, SlotState.READY), 0),), None),
        (((EPOCH << 4 | 3, 0),), None),
        (((BIG, BIG),), None),
        ((), 100),
    ],
)
def test_the_least_of_all_workers_counts_under_one_epoch(
    words: Any, tokens: int | None
) -> None:
    assert complete_tokens(words, EPOCH, 100) == tokens


@given(words=st.lists(st.tuples(st.integers(0, BIG), st.integers(0, BIG)), max_size=4))
def test_any_words_are_a_number_of_tokens_or_none(words: list[tuple[int, int]]) -> None:
    tokens = complete_tokens(tuple(words), EPOCH, 100)
    assert tokens is None or 0 <= tokens <= 100


@given(
    stops=st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    spans=st.lists(st.sampled_from([1, 3, 4, 16]), min_size=1, max_size=3),
    ranks=st.sampled_from([1, 2, 3]),
    restart=st.booleans(),
)
def test_the_pages_that_are_missing_list_the_ids_that_are_needed(
    stops: list[int], spans: list[int], ranks: int, restart: bool
) -> None:
    groups, share = (
        groups_of(*spans),
        Interleave(rank=0, ranks=ranks, run_tokens=1) if ranks > 1 else Interleave(),
    )
    num_tokens = max(stops)
    room = tuple(
        -(-num_tokens // (span * ranks)) + index for index, span in enumerate(spans)
    )
    blocks = StreamedBlocks(
        rows_of(*room),
        1,
        plan_of(*((index, share) for index in range(len(spans)))),
        groups,
        num_tokens,
    )
    row = np.arange(
        1000, 1000 + -(-sum(room) // PAGE_IDS) * PAGE_IDS, dtype=np.uint32
    ).reshape(-1, PAGE_IDS)
    for _ in range(1 + restart):
        held, seen = 0, 0
        for stop in sorted(stops):
            held = max(held, blocks.whole(stop))
            pages = blocks.missing(held, is_ready=False)
            seen += len(pages)
            blocks.take(held, {page: row[page] for page in pages}, is_ready=False)
            assert not blocks.missing(held, is_ready=False)
            first = 1000
            for ids, most, span in zip(blocks.ids(held), room, spans, strict=True):
                assert ids == list(range(first, first + -(-held // (span * ranks))))
                first += most
        assert held == num_tokens
        assert seen <= len(row) + len(stops) * len(spans), (
            "a page is read again only where it was read in part"
        )
        blocks.forget()


@pytest.mark.parametrize(
    ("rows", "row", "groups", "tokens"),
    [
        (rows_of(10, rows=2), 2, groups_of(4), 8),
        (rows_of(10, 10), 0, groups_of(4), 8),
        (rows_of(2), 0, groups_of(4), 9),
        (rows_of(1), 0, [WINDOW], 8),
    ],
)
def test_a_row_that_does_not_fit_is_refused(
    rows: StreamRows, row: int, groups: list[CacheGroup], tokens: int
) -> None:
    with pytest.raises(InvalidParams):
        StreamedBlocks(rows, row, plan_of((0, Interleave())), groups, tokens)


def test_tokens_are_rounded_down_to_whole_blocks_of_all_workers_and_groups() -> None:
    share = Interleave(rank=0, ranks=2, run_tokens=4)
    blocks = StreamedBlocks(
        rows_of(50, 50), 0, plan_of((0, share), (1, share)), groups_of(4, 12), 100
    )
    assert [blocks.whole(tokens) for tokens in (0, 23, 24, 47, 99, 100)] == [
        0,
        0,
        24,
        24,
        96,
        100,
    ]


def test_blocks_of_a_window_are_taken_when_the_prompt_is_complete() -> None:
    plan, row = (
        plan_of((0, Interleave()), (1, Interleave())),
        {0: np.arange(PAGE_IDS, dtype=np.uint32)},
    )
    blocks = StreamedBlocks(
        rows_of(5, 5), 0, plan, [*groups_of(16), WINDOW], 18, held_from=(0, 8)
    )
    assert blocks.grows
    assert blocks.has_ends
    assert [blocks.whole(tokens) for tokens in (15, 17, 18)] == [0, 16, 18], (
        "in blocks of the other group"
    )
    blocks.take(18, row, is_ready=False)
    assert blocks.ids(18) == [[0, 1], []]
    blocks.take(18, row, is_ready=True)
    assert blocks.ids(18) == [[0, 1], [5, 6, 7]]
    for group, (grows, has_ends) in enumerate([(True, False), (False, True)]):
        one = StreamedBlocks(
            rows_of(5, 5),
            0,
            plan_of((group, Interleave())),
            [*groups_of(16), WINDOW],
            18,
        )
        assert (one.grows, one.has_ends) == (grows, has_ends)


def test_a_group_that_this_worker_does_not_read_needs_no_ids() -> None:
    blocks = StreamedBlocks(
        rows_of(50, 50), 0, plan_of((1, Interleave())), groups_of(4, 4), 100
    )
    blocks.take(8, {0: np.arange(PAGE_IDS, dtype=np.uint32)}, is_ready=False)
    assert blocks.ids(8) == [[], [50, 51]]
