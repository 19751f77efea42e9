"""The collectives of prefill context parallelism, on real process groups: rows come back in order for any step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draws import draws
from tests.worker.context_parallel.model import PADDING, Batch, batches
from tests.worker.context_parallel.ranks import RankPool, rank_pool
from tests.worker.context_parallel.steps import Rows, StepResult, refusals, run_steps

GROUPS = (2, 4)
ROWS = st.builds(
    Rows,
    st.sampled_from((torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)),
    st.sampled_from(((1,), (3,), (2, 3), (8,), ())),
    st.integers(0, 2**32 - 1),
)


@pytest.fixture(scope="module")
def gloo() -> Iterator[RankPool]:
    with rank_pool(max(GROUPS), run_steps.__module__) as pool:
        yield pool


@pytest.fixture
def nccl(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    ranks, found = request.param, torch.cuda.device_count()
    if found < ranks:
        pytest.skip(
            f"NCCL needs a CUDA device for each of {ranks} ranks; PyTorch {torch.__version__} sees {found}"
        )
    with rank_pool(ranks, run_steps.__module__, "nccl") as pool:
        yield pool


@st.composite
def steps_of(draw: st.DrawFn, ranks: int) -> list[Batch]:
    """One to three steps of one engine."""
    first, *more = draw(st.lists(batches(st.just(ranks)), min_size=1, max_size=3))
    return [
        first,
        *(Batch(ranks, first.reorder_threshold, x.scheduled, x.computed) for x in more),
    ]


def check(pool: RankPool, steps: list[Batch], rows: Rows, seed: int) -> None:
    """Run the steps on all ranks and look at every byte that each has afterwards."""
    draw = np.random.default_rng(seed)
    mappings = [
        draw.permutation(3 * sum(step.scheduled))[: sum(step.scheduled)]
        for step in steps
    ]
    for mapping in mappings:
        mapping[
            draw.random(len(mapping)) < 0.1
        ] = -1  # what this engine worker does not keep
    answers = pool.run(
        steps[0].ranks,
        run_steps,
        steps,
        rows,
        [mapping.tolist() for mapping in mappings],
    )
    assert len({results[0].process for results in answers}) == steps[0].ranks
    for rank, results in enumerate(answers):
        for step, mapping, result in zip(steps, mappings, results, strict=True):
            _check_step(rank, step, mapping, rows, result)


def _check_step(
    rank: int,
    step: Batch,
    mapping: np.ndarray[tuple[int], np.dtype[np.int64]],
    rows: Rows,
    got: StepResult,
) -> None:
    content = rows.content(sum(step.scheduled))
    assert (got.hidden == content).all()
    assert got.hidden_shape == (len(content), *rows.shape)
    own = step.rank_tokens(rank)
    for found, wanted in (
        (got.positions, step.positions()),
        (got.req_indices, step.requests()),
    ):
        assert [
            at for at, token in zip(found, own, strict=True) if token != PADDING
        ] == [wanted[token] for token in own if token != PADDING]
    padded = np.array(step.padded_tokens(), np.int64)
    for cache_group, slots in enumerate(got.slots):
        there = mapping + 5 * cache_group
        assert (
            slots
            == np.where(padded == PADDING, -1, there[padded] if len(there) else -1)
        ).all()
    slots = got.slots[0]
    cache = np.full((3 * len(content), rows.row_bytes), 0x11, np.uint8)
    expected = cache.copy()
    cache[slots[slots >= 0]] = got.padded[slots >= 0]
    expected[mapping[mapping >= 0]] = content[mapping >= 0]
    assert (cache == expected).all(), (
        "a replica writes to its cache every token that it keeps, in its slot"
    )


@pytest.mark.parametrize("ranks", GROUPS)
def test_what_ranks_computed_comes_back_in_order_whatever_the_step(
    gloo: RankPool, ranks: int
) -> None:
    @settings(max_examples=draws(40))
    @given(steps_of(ranks), ROWS, st.integers(0, 2**32 - 1))
    def hold(steps: list[Batch], rows: Rows, seed: int) -> None:
        check(gloo, steps, rows, seed)

    hold()


def test_one_rank_alone_is_the_identity(gloo: RankPool) -> None:
    check(
        gloo,
        [Batch(1, 1, (1, 5, 0, 8), (3, 0, 0, 16))],
        Rows(torch.float32, (3,), 7),
        7,
    )


@pytest.mark.parametrize("nccl", [1, *GROUPS], indirect=True)
def test_the_same_over_nccl(nccl: RankPool) -> None:
    rows = Rows(torch.bfloat16, (64,), 7)
    for scheduled in ((1, 5, 0, 8), (64,), (1, 1, 1), (), (333, 1, 7)):
        check(
            nccl,
            [Batch(nccl.size, 1, scheduled, (3,) * len(scheduled))],
            rows,
            len(scheduled),
        )


REFUSALS = {
    "no step": "LocalProtocolError: no step has been partitioned yet",
    "a warm-up": "[-1, -1, -1, -1, -1, -1]",
    "the largest warm-up": "[-1]",
    "too long a warm-up": "slot_mapping is (9,); expected one dimension of at most 8, before the first step",
    "a warm-up of no dimension": "slot_mapping is (); expected one dimension of at most 8",
    "too many tokens": "InvalidBatch: batch: num_scheduled_tokens is 9; expected at most 8 tokens in all",
    "too many requests": "num_scheduled_tokens is 4; expected at most 3 requests with tokens",
    "computed of others": "num_computed_tokens is 1; expected one for each of 2 requests",
    "too few rows": "rows is ((4, 2), 'cpu'); expected 5 rows on cpu",
    "no dimension": "rows is ((), 'cpu'); expected 5 rows on cpu",
    "long rows": "bytes of a row is 20; expected at most 16",
    "too few slots": "slot_mapping is (torch.int64, (6,)); expected int64 or int32 of shape (7,)",
    "slots in fractions": "slot_mapping is (torch.float32, (7,)); expected int64 or int32 of shape (7,)",
    "no such cache group": "cache_group is 1; expected an integer from 0 to 0",
    "no tokens at all": "max_tokens is 0",
    "fractions of a request": "max_requests is 1.5",
    "rows of no bytes": "max_row_bytes is 0",
    "a negative threshold": "reorder_threshold is -1",
    "no cache groups": "cache_groups is 0",
    "the step before": "[0, 1, 2, 3, 4, 5, 6]",
}


def test_what_cannot_be_is_refused_by_name_before_any_collective_and_leaves_the_step_before(
    gloo: RankPool,
) -> None:
    found = gloo.run(2, refusals)[0]
    assert found.keys() == REFUSALS.keys()
    for what, words in REFUSALS.items():
        assert words in found[what], what
