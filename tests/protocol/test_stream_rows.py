"""Progress words and rows: what a producer's workers write for consumers that read while a prompt is computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.ids import (
    Epoch,
)
from kvferry.protocol.slots import (
    MAX_PROGRESS,
    PAGE_IDS,
    SLOT_BYTES,
    StreamRows,
    header_word,
    progress_of,
    progress_word,
)

epochs = st.integers(1, 2**60 - 1).map(Epoch)


@given(epochs, epochs, st.integers(0, 2 * MAX_PROGRESS))
def test_a_progress_word_reports_tokens_under_its_own_epoch_only(
    epoch: Epoch, other: Epoch, tokens: int
) -> None:
    word = progress_word(epoch, tokens)
    assert word < 2 ** (8 * SLOT_BYTES // 2)
    assert progress_of(word, epoch) == min(tokens, MAX_PROGRESS)
    if (epoch ^ other) & (2**40 - 1):
        assert progress_of(word, other) == 0


@given(epochs)
def test_an_empty_word_reports_nothing_and_no_header_is_empty(epoch: Epoch) -> None:
    assert progress_of(0, epoch) == 0
    assert 0 < header_word(epoch) < 2**64


@pytest.mark.parametrize(
    ("blocks", "pages"),
    [
        ((1,), 1),
        ((PAGE_IDS,), 1),
        ((PAGE_IDS + 1,), 2),
        ((100, 100, 100), 2),
        ((1 << 20,), 4096),
    ],
)
def test_a_row_has_room_for_the_blocks_of_all_groups_one_after_the_other(
    blocks: tuple[int, ...], pages: int
) -> None:
    rows = StreamRows(headers=0, ids=0, rows=1, blocks=blocks)
    assert rows.pages == pages
    assert sum(blocks) <= pages * PAGE_IDS
