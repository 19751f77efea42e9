"""DualChunkSwap: which rank computes which tokens, against a model that goes token by token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import InputError
from kvferry.worker.context_parallel import partition as partition_module
from kvferry.worker.context_parallel.partition import (
    MAX_ROWS,
    InvalidBatch,
    Partition,
    max_rank_rows,
    partition_step,
    rank_inputs,
)
from tests.worker.context_parallel.model import PADDING, Batch, batches


def partition(batch: Batch) -> Partition:
    return partition_step(
        batch.scheduled,
        batch.computed,
        ranks=batch.ranks,
        reorder_threshold=batch.reorder_threshold,
    )


@given(batches())
def test_every_rank_gets_the_tokens_requests_and_positions_of_the_definition(
    batch: Batch,
) -> None:
    made, positions = partition(batch), np.array(batch.positions(), np.int64)
    requests = np.array(batch.requests(), np.int64)
    assert made.is_decode.tolist() == [
        batch.is_decode(request) for request in range(len(batch.scheduled))
    ]
    for rank in range(batch.ranks):
        own, wanted = (
            rank_inputs(made, rank),
            np.array(batch.rank_tokens(rank), np.int64),
        )
        real = wanted != PADDING
        assert (own.is_padding == ~real).all()
        assert (own.tokens[real] == wanted[real]).all()
        assert (own.positions == positions[own.tokens]).all(), (
            "padding has the position of the token that it repeats"
        )
        assert (own.req_indices == requests[own.tokens]).all(), (
            "padding belongs to the request of that token"
        )
        assert (
            np.bincount(own.req_indices, minlength=len(batch.scheduled))
            == made.rank_tokens
        ).all()
        assert len(own.tokens) == made.rank_rows, (
            "all ranks have the same number of rows"
        )


@given(batches(), st.integers(0, 2**32 - 1))
def test_partition_all_gather_and_restore_are_the_identity(
    batch: Batch, seed: int
) -> None:
    made, draw = partition(batch), np.random.default_rng(seed)
    scheduled = draw.integers(0, 2**62, len(batch.positions()))
    gathered = []
    for rank in range(batch.ranks):
        own = rank_inputs(made, rank)
        gathered.append(np.where(own.is_padding, -7, scheduled[own.tokens]))
    padded = np.concatenate(gathered)[made.restore_index]
    assert (padded[made.unpad_mask] == scheduled).all()
    wanted = np.array(batch.padded_tokens(), np.int64)
    assert (made.unpad_mask == (wanted != PADDING)).all()
    assert sorted(made.restore_index) == list(range(made.num_rows)), (
        "every gathered row has one place"
    )


@given(batches())
def test_ranks_attend_to_equally_much_of_a_prompt_that_divides(batch: Batch) -> None:
    """All ranks' tokens attend to equally many, for requests with full chunks that begin at their first token."""
    made = partition(replace(batch, computed=(0,) * len(batch.scheduled)))
    work = []
    for rank in range(batch.ranks):
        own = rank_inputs(made, rank)
        full = np.repeat(
            made.scheduled_tokens % (2 * batch.ranks) == 0, made.rank_tokens
        )
        work.append(int((own.positions + 1)[full].sum()))
    assert len(set(work)) == 1


@given(batches(), st.integers(0, 9), st.integers(0, 5))
def test_buffers_of_the_computed_size_hold_any_step(
    batch: Batch, tokens: int, requests: int
) -> None:
    """Also for an engine whose limits are above the numbers of this step."""
    limits = (
        sum(batch.scheduled) + tokens,
        sum(count > 0 for count in batch.scheduled) + requests,
    )
    assert partition(batch).rank_rows <= max_rank_rows(
        *limits, ranks=batch.ranks, reorder_threshold=batch.reorder_threshold
    )


def test_a_partition_cannot_be_changed() -> None:
    made = partition_step([1, 6], [0, 0], ranks=2)
    own = rank_inputs(made, 0)
    for array in (
        made.restore_index,
        made.unpad_mask,
        made.scheduled_tokens,
        own.tokens,
        own.req_indices,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_short_prompt_without_context_is_shared_out_as_a_prefill() -> None:
    """Backends treat up to 512 tokens as a decode (vLLM's FlashAttention MLA), but a prompt of as many is none."""
    prompt = partition_step([512], [0], ranks=4, reorder_threshold=512)
    assert prompt.rank_rows == 128
    assert rank_inputs(prompt, 1).tokens.tolist() == [*range(64, 128), *range(384, 448)]
    extend = partition_step([512], [1], ranks=4, reorder_threshold=512)
    assert extend.rank_rows == 512, "with context, every rank computes all of them"


def test_the_example_of_the_docstring() -> None:
    """A decode A and a prefill B … G on 2 ranks."""
    letters = np.array(list("ABCDEFG"))
    made = partition_step([1, 6], [41, 0], ranks=2)
    ranks = [rank_inputs(made, rank) for rank in range(2)]
    rows = [np.where(own.is_padding, "·", letters[own.tokens]) for own in ranks]
    assert ["".join(row) for row in rows] == ["ABC··", "ADEFG"]
    assert [own.positions.tolist() for own in ranks] == [
        [41, 0, 1, 5, 5],
        [41, 2, 3, 4, 5],
    ]
    assert [own.req_indices.tolist() for own in ranks] == [[0, 1, 1, 1, 1]] * 2
    assert made.restore_index.tolist() == [0, 5, 1, 2, 6, 7, 8, 9, 3, 4]
    assert made.unpad_mask.astype(int).tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert "".join(np.concatenate(rows)[made.restore_index]) == "AABCDEFG··"
    assert (
        "".join(np.concatenate(rows)[made.restore_index][made.unpad_mask]) == "ABCDEFG"
    )
    lines = [
        ("scheduled", letters),
        ("padded", np.concatenate(rows)[made.restore_index]),
        *((f"rank {rank}", row) for rank, row in enumerate(rows)),
        ("req_indices", ranks[0].req_indices),
        ("gathered", np.concatenate(rows)),
        ("restore_index", made.restore_index),
        ("unpad_mask", made.unpad_mask.astype(int)),
    ]
    for name, values in lines:
        found = re.search(
            rf"^ *{name}  +((?:\S ?)+)", partition_module.__doc__ or "", re.MULTILINE
        )
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
        partition_step(BAD_COUNTS[name], [0, 0], ranks=2)
    assert isinstance(caught.value, InputError)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("computed", [[0], [0, 0, 0], [0, -1], None, [0, 1 << 41]])
def test_numbers_of_computed_tokens_that_cannot_be_are_named(computed: Any) -> None:
    with pytest.raises(InvalidBatch, match="num_computed_tokens"):
        partition_step([1, 6], computed, ranks=2)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, None, 1 << 20])
def test_a_number_of_ranks_that_cannot_be_is_named(ranks: Any) -> None:
    with pytest.raises(InvalidBatch, match="ranks"):
        partition_step([4], [0], ranks=ranks)


@pytest.mark.parametrize("threshold", [-1, 1.0, True, "1", MAX_ROWS + 1])
def test_a_threshold_that_cannot_be_is_named(threshold: Any) -> None:
    with pytest.raises(InvalidBatch, match="reorder_threshold"):
        partition_step([4], [0], ranks=2, reorder_threshold=threshold)
    with pytest.raises(InvalidBatch, match="reorder_threshold"):
        max_rank_rows(4, 1, ranks=2, reorder_threshold=threshold)
