"""Which block belongs in which, token by token."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.plan.blocks import NULL_BLOCK, GroupBlocks, pair_blocks
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup


def side(ids: Sequence[int], block_tokens: int = 4, kernel_tokens: int = 4, kernel_blocks: int = 64) -> GroupBlocks:
    return GroupBlocks(ids, CacheGroup(policy="full", block_tokens=block_tokens), kernel_tokens, kernel_blocks)


def pairs(local: GroupBlocks, remote: GroupBlocks, first: int, stop: int, held: int) -> list[tuple[int, int]]:
    found = pair_blocks(3, local, remote, first, stop, held)
    return list(zip(found.local.tolist(), found.remote.tolist(), strict=True))


class Uncovered(Exception):
    """The brute force found a token whose block is not there, or an id that no block has."""


def kernel_block(of: GroupBlocks, token: int, missing: int) -> int | None:
    """The kernel block that holds a token, by walking the sequence; None where a null block stands."""
    scheduler_block, offset = divmod(token, of.group.block_tokens)
    if not 0 <= scheduler_block - missing < len(of.ids):
        raise Uncovered
    block = of.ids[scheduler_block - missing]
    return None if block == NULL_BLOCK else block * of.ratio + offset // of.kernel_tokens


def by_tokens(local: GroupBlocks, remote: GroupBlocks, first: int, stop: int, held: int) -> list[tuple[int, int]]:
    missing = -(-held // remote.group.block_tokens) - len(remote.ids)
    if missing < 0 or stop > held:
        raise Uncovered
    found: dict[int, int] = {}
    for token in range(first, stop):
        here = kernel_block(local, token, 0)
        if here is None:
            continue
        there = kernel_block(remote, token, missing)
        if there is None or there >= remote.kernel_blocks:
            raise Uncovered
        assert found.setdefault(here, there) == there
    return list(found.items())


Asked = tuple[GroupBlocks, GroupBlocks, int, int, int]


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A request that can be served: leading nulls where no block is held, and remote blocks from the first needed."""
    kernel = draw(st.integers(1, 4))
    here, there = (kernel * draw(st.integers(1, 4)) for _ in range(2))
    held = draw(st.integers(1, 40))
    stop = draw(st.one_of(st.just(held), st.integers(0, held)))
    first = draw(st.integers(0, stop)) // here * here
    count = -(-stop // here) + draw(st.integers(0, 1))
    nulls = draw(st.sampled_from((0, 0, count // 2, count)))
    ids = [NULL_BLOCK] * nulls + draw(st.permutations(range(1, 41)))[: count - nulls]
    total = -(-held // there)
    missing = draw(st.integers(0, min(max(first, nulls * here) // there, total)))
    remote = draw(st.lists(st.integers(1, 15), min_size=total - missing, max_size=total - missing))
    return side(ids, here, kernel), side(remote, there, kernel, kernel_blocks=16 * there // kernel), first, stop, held


@st.composite
def broken_requests(draw: st.DrawFn) -> Asked:
    """A request with one thing changed, which may or may not matter to it."""
    local, remote, first, stop, held = draw(requests())
    ids, theirs = list(local.ids), list(remote.ids)
    change = draw(st.sampled_from(("one more", "one fewer", "a null", "too high", "longer", "shorter local")))
    at = draw(st.integers(0, max(0, len(theirs) - 1)))
    if change == "one more":
        theirs.insert(0, 3)
    elif change == "longer":
        stop += draw(st.integers(1, 4))
    elif change == "shorter local":
        ids = ids[:-1]
    elif theirs:
        theirs[at : at + 1] = {"one fewer": [], "a null": [NULL_BLOCK], "too high": [16]}[change]
    here = side(ids, local.group.block_tokens, local.kernel_tokens)
    return here, side(theirs, remote.group.block_tokens, remote.kernel_tokens, remote.kernel_blocks), first, stop, held


@given(requests())
def test_any_request_that_can_be_served_is_paired_as_its_tokens_say(asked: Asked) -> None:
    assert pairs(*asked) == by_tokens(*asked)


@given(broken_requests())
@example((side([9, 8, 7]), side([1, 2, 3]), 0, 12, 12))
@example((side([0, 0, 7]), side([3]), 0, 12, 12))
@example((side([5, 6], 8, 4), side([1, 2, 3, 4]), 8, 15, 15))
def test_any_change_is_paired_or_refused_as_the_tokens_say(
    asked: Asked,
) -> None:
    try:
        expected = by_tokens(*asked)
    except Uncovered:
        with pytest.raises(InvalidParams, match="remote_block_ids"):
            pairs(*asked)
    else:
        assert pairs(*asked) == expected


def test_a_partial_local_hit_reads_only_what_comes_after_it() -> None:
    assert pairs(side([9, 8, 7]), side([1, 2, 3]), 4, 12, 12) == [(8, 2), (7, 3)]


def test_a_window_reads_only_the_blocks_that_both_still_hold() -> None:
    """The consumer holds null blocks where its window has passed, the producer lists only its last blocks."""
    assert pairs(side([0, 0, 7, 6]), side([3, 4]), 0, 16, 16) == [(7, 3), (6, 4)]
    assert pairs(side([0, 0, 0, 6]), side([3, 4]), 0, 16, 16) == [(6, 4)]


def test_a_prompt_that_shares_only_its_beginning_reads_the_first_remote_blocks() -> None:
    """The ids end with the block of the producer's last token, not with the last one wanted."""
    assert pairs(side([9, 8]), side([1, 2, 3, 4]), 0, 7, 16) == [(9, 1), (8, 2)]


def test_scheduler_blocks_of_different_sizes_meet_in_equal_kernel_blocks() -> None:
    assert pairs(side([9], 8, 2), side([5, 6], 4, 2), 0, 8, 8) == [(36, 10), (37, 11), (38, 12), (39, 13)]
    assert pairs(side([9, 8], 4, 2), side([5], 8, 2), 4, 7, 7) == [(16, 22), (17, 23)]


def test_no_tokens_need_no_blocks() -> None:
    assert pairs(side([9]), side([]), 4, 4, 4) == []


@pytest.mark.parametrize(
    ("local", "remote", "span", "says"),
    [
        (side([9]), side([1, 2]), (0, 4, 4), "2 blocks'; expected at most 1 blocks for 4 tokens"),
        (side([9, 8]), side([1, 64]), (0, 8, 8), "is 64; expected block ids up to 63"),
        (side([9], 8, 4), side([32], 8, 4), (0, 8, 8), "is 32; expected block ids up to 31"),
        (side([9, 8]), side([2]), (0, 8, 8), "1 blocks'; expected blocks for all tokens from 0 to 8"),
        (side([9, 8]), side([0, 2]), (0, 8, 8), "2 blocks'; expected blocks for all tokens from 0 to 8"),
        (side([9, 8]), side([1, 0]), (0, 8, 8), "2 blocks'; expected blocks for all tokens from 0 to 8"),
        (side([9, 8, 7]), side([1, 2]), (0, 12, 8), "expected at most the 8 tokens that are held"),
        (side([9]), side([1]), (0, 4, 3), "expected at most the 3 tokens that are held"),
        (side([9]), side([1, 2]), (0, 8, 8), "expected no more than 4 local tokens"),
    ],
)
def test_every_refusal_names_the_group_and_what_would_be_right(
    local: GroupBlocks, remote: GroupBlocks, span: tuple[int, int, int], says: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        pair_blocks(3, local, remote, *span)
    assert refused.value.field == "remote_block_ids[3]"
    assert says in str(refused.value)


def test_an_out_of_range_id_that_nobody_needs_is_not_read() -> None:
    assert pairs(side([9, 8]), side([1 << 30, 2]), 4, 8, 8) == [(8, 2)]


def test_a_sequence_said_to_be_huge_costs_no_memory() -> None:
    """The number of tokens is the producer's word, up to 2**28 of them."""
    tracemalloc.start()
    with pytest.raises(InvalidParams):
        pairs(side([9], 1, 1), side([1], 1, 1), 0, 1, 1 << 28)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
