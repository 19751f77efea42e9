"""Pairs of blocks by example: what is read, and what is refused by name."""

from __future__ import annotations

import tracemalloc

import pytest

from kvferry.plan.blocks import RequestBlocks, pair_request, pair_units
from kvferry.plan.planner import plan_transfer
from kvferry.plan.tokens import map_tokens
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.geometry import Interleave
from kvferry.protocol.handshake import CacheGroup
from tests.plan.samples import engine, tensor
from tests.plan.test_blocks import HERE, THERE, Asked, asked


def blocks_of(case: Asked) -> list[tuple[int, int]]:
    pairs = case.pair()
    return list(zip(pairs.local_block.tolist(), pairs.remote_block.tolist(), strict=True))


def test_a_partial_local_hit_reads_only_what_comes_after_it() -> None:
    assert blocks_of(asked([9, 8, 7], [1, 2, 3], (4, 12))) == [(8, 2), (7, 3)]


def test_a_window_reads_only_the_blocks_that_both_still_hold() -> None:
    """The consumer holds null blocks where its window has passed, the producer lists only its last blocks."""
    assert blocks_of(asked([0, 0, 7, 6], [3, 4], (0, 16), window=6)) == [(7, 3), (6, 4)]
    assert blocks_of(asked([0, 0, 0, 6], [3, 4], (0, 16), window=6)) == [(6, 4)]
    clipped = asked([9, 8, 7, 6], [3, 4], (0, 16), window=6)
    assert blocks_of(clipped) == [(7, 3), (6, 4)], "blocks that nothing attends to are left out"
    assert clipped.pair().first_slot == 8
    with pytest.raises(InvalidParams, match="expected blocks for all tokens from 7 to 16"):
        asked([9, 8, 7, 6], [3, 4], (0, 16), window=10).pair()


def test_a_prompt_that_shares_only_its_beginning_reads_the_first_remote_blocks() -> None:
    """The ids end with the block of the producer's last token, not with the last one wanted."""
    assert blocks_of(asked([9, 8], [1, 2, 3, 4], (0, 7), 16)) == [(9, 1), (8, 2)]


def test_scheduler_blocks_of_different_sizes_meet_in_equal_kernel_blocks() -> None:
    case = asked([9], [5, 6], (0, 8), blocks=(8, 4), kernels=(2, 2))
    assert blocks_of(case) == [(36, 10), (37, 11), (38, 12), (39, 13)]
    case = asked([9, 8], [5], (4, 7), 7, blocks=(4, 8), kernels=(2, 2))
    assert blocks_of(case) == [(16, 22), (17, 23)]


def test_blocks_of_16_and_24_tokens_meet_in_positions_of_8() -> None:
    pairs = asked([9, 8, 7], [5, 6], (0, 48), blocks=(16, 24)).pair()
    assert pairs.local_block.tolist() == [9, 9, 8, 8, 7, 7]
    assert pairs.local_position.tolist() == [0, 1, 0, 1, 0, 1]
    assert pairs.remote_block.tolist() == [5, 5, 5, 6, 6, 6]
    assert pairs.remote_position.tolist() == [0, 1, 2, 0, 1, 2]


def test_under_an_interleave_a_block_counts_the_slots_of_its_own_rank() -> None:
    """Two ranks on the producer, runs of 2: block 5 of rank 1 holds the tokens 2, 3, 6 and 7."""
    half = Interleave(ranks=2, rank=1, run_tokens=2)
    pairs = asked([9, 8], [5], (0, 8), shares=(Interleave(), half)).pair()
    assert list(zip(pairs.local_block.tolist(), pairs.local_position.tolist(), strict=True)) == [(9, 1), (8, 1)]
    assert list(zip(pairs.remote_block.tolist(), pairs.remote_position.tolist(), strict=True)) == [(5, 0), (5, 1)]
    assert pairs.first_slot == 2


def test_no_tokens_need_no_blocks() -> None:
    assert len(asked([9], [], (4, 4)).pair()) == 0


def test_a_state_is_the_last_block_that_either_side_holds() -> None:
    state = CacheGroup(policy="state", block_tokens=16)
    tokens = map_tokens(0, "state", tensor(block_tokens=16, blocks=9), tensor(block_tokens=4, blocks=5))
    pairs = pair_units(tokens, state, state, RequestBlocks([[0, 0, 7]], [[2, 4, 0]], 0, 40, 40))
    assert (pairs.local_block.tolist(), pairs.remote_block.tolist()) == ([7], [4])
    assert (pairs.local_position.tolist(), pairs.remote_position.tolist()) == ([0], [0])


@pytest.mark.parametrize(
    ("local", "remote", "stop", "says"),
    [
        ([7], [4], 39, "expected all 40 tokens, or none: a recurrent state cannot be divided"),
        ([7], [0], 40, "expected a block with the state on both sides"),
        ([], [4], 40, "expected a block with the state on both sides"),
        ([7], [5], 40, "remote_block_ids[0] is 5; expected block ids up to 4"),
        ([9], [4], 40, "local_blocks is 9; expected block ids up to 8"),
    ],
)
def test_a_state_that_is_not_there_is_refused(local: list[int], remote: list[int], stop: int, says: str) -> None:
    state = CacheGroup(policy="state", block_tokens=16)
    tokens = map_tokens(0, "state", tensor(block_tokens=16, blocks=9), tensor(block_tokens=4, blocks=5))
    with pytest.raises(InvalidParams) as refused:
        pair_units(tokens, state, state, RequestBlocks([local], [remote], 0, stop, 40))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (asked([9], [1, 2], (0, 4)), "2 blocks'; expected at most 1 blocks for 4 tokens"),
        (asked([9, 8], [1, THERE], (0, 8)), f"is {THERE}; expected block ids up to {THERE - 1}"),
        (asked([9, 8], [1, -2], (0, 8)), f"expected block ids up to {THERE - 1}"),
        (asked([9], [THERE], (0, 8), blocks=(8, 8), kernels=(4, 4)), f"is {THERE}; expected block ids up to"),
        (asked([9, 8], [2], (0, 8)), "1 blocks'; expected blocks for all tokens from 0 to 8"),
        (asked([9, 8], [0, 2], (0, 8)), "2 blocks'; expected blocks for all tokens from 0 to 8"),
        (asked([9, 8], [1, 0], (0, 8)), "2 blocks'; expected blocks for all tokens from 0 to 8"),
        (asked([9, 8, 7], [1, 2], (0, 12), 8), "expected at most the 8 tokens that are held"),
        (asked([9], [1, 2], (0, 8)), "expected no more than 1 local blocks of 4 tokens"),
    ],
)
def test_every_refusal_names_the_group_and_what_would_be_right(case: Asked, says: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        case.pair()
    assert refused.value.field == "remote_block_ids[0]"
    assert says in str(refused.value)


def test_a_local_block_outside_the_cache_is_refused_as_such() -> None:
    with pytest.raises(InvalidParams) as refused:
        asked([9, HERE], [1, 2], (0, 8)).pair()
    assert refused.value.field == "local_blocks[0]"


def test_an_out_of_range_id_that_is_not_needed_is_not_read() -> None:
    assert blocks_of(asked([9, 8], [1 << 30, 2], (4, 8))) == [(8, 2)]


def test_a_request_is_paired_once_per_token_map_of_a_plan() -> None:
    groups = (CacheGroup(policy="full", block_tokens=4), CacheGroup(policy="full", block_tokens=8))
    tensors = [tensor(), tensor(layer="layers.1"), tensor(layer="layers.2", group=1, block_tokens=8)]
    plan = plan_transfer(engine(*tensors, groups=groups), 0, engine(*tensors, groups=groups))
    request = RequestBlocks([[5, 6], [7]], [[1, 2], [3]], 0, 8, 8)
    pairs = pair_request(plan, groups, groups, request)
    found = {tokens.group: (one.local_block.tolist(), one.remote_block.tolist()) for tokens, one in pairs.items()}
    assert found == {0: ([5, 6], [1, 2]), 1: ([7], [3])}


def test_a_sequence_said_to_be_huge_costs_no_memory() -> None:
    """The number of tokens is the producer's word, up to 2**28 of them."""
    case = asked([9], [1], (0, 1), 1 << 28, blocks=(1, 1))
    tracemalloc.start()
    with pytest.raises(InvalidParams):
        case.pair()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
