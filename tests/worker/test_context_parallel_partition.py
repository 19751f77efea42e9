"""DualChunkSwap: who computes which tokens, against a model that goes token by token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import InputError
from kvferry.worker.context_parallel import partition as partition_module
from kvferry.worker.context_parallel.invalid_batch import InvalidBatch
from kvferry.worker.context_parallel.partition import (
    MAX_ROWS,
    Partition,
    most_rank_rows,
    partition_step,
    rank_inputs,
)
from tests.worker.context_parallel_model import PADDING, Batch, batches


def partition(batch: Batch) -> Partition:
    return partition_step(batch.scheduled, ranks=batch.ranks, reorder_threshold=batch.reorder_threshold)


@given(batches())
def test_every_rank_gets_the_tokens_and_positions_of_the_definition(batch: Batch) -> None:
    made, positions = partition(batch), np.array(batch.positions(), np.int64)
    for rank in range(batch.ranks):
        own, wanted = rank_inputs(made, rank, batch.computed), np.array(batch.rank_tokens(rank), np.int64)
        real = wanted != PADDING
        assert (own.is_padding == ~real).all()
        assert (own.tokens[real] == wanted[real]).all()
        assert (own.positions == positions[own.tokens]).all(), "padding has the position of the token that it repeats"
        assert len(own.tokens) == made.rank_rows, "all ranks have the same number of rows"


@given(batches(), st.integers(0, 2**32 - 1))
def test_partition_all_gather_and_restore_are_the_identity(batch: Batch, seed: int) -> None:
    made, draw = partition(batch), np.random.default_rng(seed)
    scheduled = draw.integers(0, 2**62, len(batch.positions()))
    gathered = []
    for rank in range(batch.ranks):
        own = rank_inputs(made, rank, batch.computed)
        gathered.append(np.where(own.is_padding, -7, scheduled[own.tokens]))
    padded = np.concatenate(gathered)[made.restore_index]
    assert (padded[made.unpad_mask] == scheduled).all()
    wanted = np.array(batch.padded_tokens(), np.int64)
    assert (made.unpad_mask == (wanted != PADDING)).all()
    assert sorted(made.restore_index) == list(range(made.num_rows)), "every gathered row has one place"


@given(batches())
def test_ranks_attend_to_equally_much_of_a_prompt_that_divides(batch: Batch) -> None:
    """What a rank's tokens attend to, of requests whose chunks are full and that begin at their first token."""
    made = partition(batch)
    work = []
    for rank in range(batch.ranks):
        own = rank_inputs(made, rank, [0] * len(batch.scheduled))
        full = np.repeat(made.scheduled_tokens % (2 * batch.ranks) == 0, made.rank_tokens)
        work.append(int((own.positions + 1)[full].sum()))
    assert len(set(work)) == 1


@given(batches(), st.integers(0, 9), st.integers(0, 5))
def test_buffers_of_the_computed_size_hold_any_step(batch: Batch, tokens: int, requests: int) -> None:
    """Also of an engine whose limits are above what this step has."""
    limits = sum(batch.scheduled) + tokens, sum(count > 0 for count in batch.scheduled) + requests
    assert partition(batch).rank_rows <= most_rank_rows(
        *limits, ranks=batch.ranks, reorder_threshold=batch.reorder_threshold
    )


def test_a_partition_cannot_be_changed() -> None:
    made = partition_step([1, 6], ranks=2)
    for array in (made.restore_index, made.unpad_mask, made.scheduled_tokens, rank_inputs(made, 0, [0, 0]).tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_the_caller_keeps_its_own_numbers() -> None:
    scheduled = np.array([3, 9])
    partition_step(scheduled, ranks=2)
    scheduled[0] = 4
    assert scheduled.tolist() == [4, 9]


def test_the_example_of_the_documents() -> None:
    """docs/architecture.md and the module's docstring: a decode A and a prefill B … G on 2 ranks."""
    letters = np.array(list("ABCDEFG"))
    made = partition_step([1, 6], ranks=2)
    rows = []
    for rank in range(2):
        own = rank_inputs(made, rank, [41, 0])
        rows.append(np.where(own.is_padding, "·", letters[own.tokens]))
    assert ["".join(row) for row in rows] == ["ABC··", "ADEFG"]
    assert rank_inputs(made, 0, [41, 0]).positions.tolist() == [41, 0, 1, 5, 5]
    assert rank_inputs(made, 1, [41, 0]).positions.tolist() == [41, 2, 3, 4, 5]
    assert made.restore_index.tolist() == [0, 5, 1, 2, 6, 7, 8, 9, 3, 4]
    assert made.unpad_mask.astype(int).tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert "".join(np.concatenate(rows)[made.restore_index]) == "AABCDEFG··"
    assert "".join(np.concatenate(rows)[made.restore_index][made.unpad_mask]) == "ABCDEFG"
    lines = [
        ("scheduled", letters),
        ("padded", np.concatenate(rows)[made.restore_index]),
        *((f"rank {rank}", row) for rank, row in enumerate(rows)),
        ("gathered", np.concatenate(rows)),
        ("restore_index", made.restore_index),
        ("unpad_mask", made.unpad_mask.astype(int)),
    ]
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    for text in (page, partition_module.__doc__ or ""):
        for name, values in lines:
            found = re.search(rf"^ *{name}  +((?:\S ?)+)", text, re.MULTILINE)
            assert found, name
            assert found[1].split() == [str(value) for value in values]


BAD_COUNTS: dict[str, Any] = {
    "a negative number": [4, -1],
    "fractions": [4.0, 2.0],
    "not a number": [float("nan")],
    "truth values": [True, False],
    "texts": ["4"],
    "a text": "44",
    "nothing": None,
    "a table": [[4], [2]],
    "rows of other lengths": [[4], [2, 3]],
    "one number": 4,
    "beyond 64 bits": [1 << 70],
    "unsigned and huge": np.array([1 << 63], np.uint64),
    "more than a worker may hold": [MAX_ROWS + 1],
    "more than a worker may hold together": [MAX_ROWS, MAX_ROWS],
}


@pytest.mark.parametrize("name", BAD_COUNTS)
def test_numbers_of_tokens_that_cannot_be_are_named(name: str) -> None:
    with pytest.raises(InvalidBatch, match="num_scheduled_tokens") as caught:
        partition_step(BAD_COUNTS[name], ranks=2)
    assert isinstance(caught.value, InputError)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("computed", [[0], [0, 0, 0], [0, -1], None, [0, 1 << 41]])
def test_numbers_of_computed_tokens_that_cannot_be_are_named(computed: Any) -> None:
    with pytest.raises(InvalidBatch, match="num_computed_tokens"):
        rank_inputs(partition_step([1, 6], ranks=2), 0, computed)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, None, 1 << 20])
def test_a_number_of_ranks_that_cannot_be_is_named(ranks: Any) -> None:
    with pytest.raises(InvalidBatch, match="ranks"):
        partition_step([4], ranks=ranks)


@pytest.mark.parametrize("rank", [-1, 2, 0.0, None])
def test_a_rank_that_is_not_there_is_named(rank: Any) -> None:
    with pytest.raises(InvalidBatch, match="rank"):
        rank_inputs(partition_step([4], ranks=2), rank, [0])


def test_a_threshold_that_cannot_be_is_named() -> None:
    with pytest.raises(InvalidBatch, match="reorder_threshold"):
        partition_step([4], ranks=2, reorder_threshold=-1)
