"""Which unit belongs in which, token by token."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.plan.blocks import NULL_BLOCK, RequestBlocks, UnitPairs, pair_units
from kvferry.plan.tokens import TokenMap, map_tokens
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.geometry import Interleave
from kvferry.protocol.handshake import CacheGroup
from tests.plan.samples import tensor, tokens_of

HERE, THERE = 71, 17
"""Scheduler blocks of either cache."""
COUNTED = 100
"""Tokens that the brute force looks at: more than any request has, its last unit included."""


EVERY_SECOND = (Interleave(ranks=2, rank=0, run_tokens=4),) * 2
"""Runs of 4 tokens on both sides: the share has no token from 4 to 7."""


@dataclass(frozen=True)
class Asked:
    """Everything that pairing depends on, for the only group."""

    here: CacheGroup
    there: CacheGroup
    tokens: TokenMap
    request: RequestBlocks

    def pair(self) -> UnitPairs:
        return pair_units(self.tokens, self.here, self.there, self.request)


def asked(
    local: Sequence[int],
    remote: Sequence[int],
    wanted: tuple[int, int],
    held: int | None = None,
    blocks: tuple[int, int] = (4, 4),
    kernels: tuple[int, int] | None = None,
    window: int = 0,
    shares: tuple[Interleave, Interleave] = (Interleave(), Interleave()),
) -> Asked:
    policy = "window" if window else "full"
    here, there = (
        CacheGroup(policy=policy, block_tokens=size, window_tokens=window)
        for size in blocks
    )
    sides = [
        tensor(block_tokens=kernel, blocks=count * size // kernel, interleave=share)
        for kernel, size, count, share in zip(
            kernels or blocks, blocks, (HERE, THERE), shares, strict=True
        )
    ]
    tokens = map_tokens(0, policy, *sides)
    first, stop = wanted
    request = RequestBlocks(
        [local], [remote], first, stop, stop if held is None else held
    )
    return Asked(here, there, tokens, request)


def slots_of(share: Interleave, count: int) -> dict[int, int]:
    """Token → slot."""
    return {token: slot for slot, token in enumerate(tokens_of(share, count))}


class Uncovered(Exception):
    """The brute force found a token whose block is not there."""


Spot = tuple[int, int]
"""A kernel block and a slot in it."""


def spot(
    ids: Sequence[int],
    missing: int,
    group: CacheGroup,
    kernel: int,
    slot: int,
    blocks: int,
) -> Spot | None:
    """Where a slot is, by walking the list of blocks; None where no block is held."""
    at, inside = divmod(slot, group.block_tokens)
    if at - missing >= len(ids):
        raise Uncovered
    if at < missing or ids[at - missing] == NULL_BLOCK:
        return None
    if not 0 <= ids[at - missing] < blocks:
        raise Uncovered
    return ids[at - missing] * (
        group.block_tokens // kernel
    ) + inside // kernel, inside % kernel


def by_tokens(case: Asked) -> dict[int, tuple[Spot, Spot]]:
    """Every token of every unit that holds a wanted one: where it belongs and where it comes from."""
    request, tokens = case.request, case.tokens
    local_ids, remote_ids = request.local[0], request.remote[0]
    here = slots_of(tokens.local.share, COUNTED)
    there = slots_of(tokens.remote.share, COUNTED)
    total = -(
        -request.num_tokens // (case.there.block_tokens * tokens.remote.share.ranks)
    )
    missing = total - len(remote_ids)
    if missing < 0 or request.stop_token > request.num_tokens:
        raise Uncovered
    in_unit: dict[int, list[int]] = {}
    for token in here.keys() & there.keys():
        in_unit.setdefault(here[token] // tokens.unit_tokens, []).append(token)
    needed_from = (
        request.stop_token - case.here.window_tokens + 1
        if case.here.policy == "window"
        else 0
    )
    found: dict[int, tuple[Spot, Spot]] = {}
    for unit in in_unit.values():
        if not any(request.first_token <= token < request.stop_token for token in unit):
            continue
        for token in unit:
            to = spot(
                local_ids, 0, case.here, tokens.local.block_tokens, here[token], HERE
            )
            if to is None:
                continue
            source = spot(
                remote_ids,
                missing,
                case.there,
                tokens.remote.block_tokens,
                there[token],
                THERE,
            )
            if source is not None:
                found[token] = (to, source)
            elif max(unit) >= needed_from:
                raise Uncovered
    return found


def unit_spots(case: Asked, pairs: UnitPairs) -> Iterator[tuple[Spot, Spot]]:
    unit = case.tokens.unit_tokens
    columns = (
        pairs.local_block,
        pairs.local_position,
        pairs.remote_block,
        pairs.remote_position,
    )
    for here, at, there, source in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        for inside in range(unit):
            yield (here, at * unit + inside), (there, source * unit + inside)


@st.composite
def interleaves(draw: st.DrawFn) -> tuple[Interleave, Interleave]:
    sides = []
    for _ in range(2):
        ranks = draw(st.sampled_from((1, 1, 2, 3)))
        run = draw(st.sampled_from((1, 2, 4)))
        sides.append(
            Interleave(
                ranks=ranks,
                rank=draw(st.integers(0, ranks - 1)),
                run_tokens=run if ranks > 1 else 1,
            )
        )
    return (sides[0], sides[0]) if draw(st.booleans()) else (sides[0], sides[1])


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A request that can be served: leading nulls where no block is held, and remote blocks from the first needed."""
    shares = draw(interleaves())
    kernels = tuple(draw(st.sampled_from((1, 2, 3, 4, 6))) for _ in range(2))
    # A scheduler block holds whole runs: otherwise its rank could not tell how many of its slots are used.
    least = [
        math.lcm(kernel, share.run_tokens)
        for kernel, share in zip(kernels, shares, strict=True)
    ]
    blocks = tuple(size * draw(st.integers(1, 3)) for size in least)
    num_tokens = draw(st.integers(1, 60))
    stop = draw(st.one_of(st.just(num_tokens), st.integers(0, num_tokens)))
    first = draw(st.integers(0, stop))
    window = draw(st.sampled_from((0, 0, 2, 5, 30)))
    case = asked((), (), (first, stop), num_tokens, blocks, kernels, window, shares)  # type: ignore[arg-type]
    count = -(-stop // (blocks[0] * shares[0].ranks)) + draw(st.integers(0, 1))
    nulls = draw(st.sampled_from((0, 0, count // 2, count)))
    local = [NULL_BLOCK] * nulls + draw(st.permutations(range(1, HERE)))[
        : count - nulls
    ]
    total = -(-num_tokens // (blocks[1] * shares[1].ranks))
    needed_from = max(0, stop - window + 1 if window else first)
    missing = draw(
        st.integers(0, min(needed_from // (blocks[1] * shares[1].ranks), total))
    )
    remote = draw(
        st.lists(
            st.integers(1, THERE - 1),
            min_size=total - missing,
            max_size=total - missing,
        )
    )
    return replace(
        case, request=RequestBlocks([local], [remote], first, stop, num_tokens)
    )


@st.composite
def broken_requests(draw: st.DrawFn) -> Asked:
    """A request with one thing changed, which may or may not matter to it."""
    case = draw(requests())
    request = case.request
    local, remote, stop = (
        list(request.local[0]),
        list(request.remote[0]),
        request.stop_token,
    )
    change = draw(
        st.sampled_from(
            ("one more", "one fewer", "a null", "too high", "longer", "shorter local")
        )
    )
    at = draw(st.integers(0, max(0, len(remote) - 1)))
    if change == "one more":
        remote.insert(0, 3)
    elif change == "longer":
        stop += draw(st.integers(1, 4))
    elif change == "shorter local":
        local = local[:-1]
    elif remote:
        remote[at : at + 1] = {
            "one fewer": [],
            "a null": [NULL_BLOCK],
            "too high": [THERE],
        }[change]
    return replace(
        case,
        request=RequestBlocks(
            [local], [remote], request.first_token, stop, request.num_tokens
        ),
    )


def check(case: Asked) -> None:
    expected = by_tokens(case)
    pairs = case.pair()
    spots = list(unit_spots(case, pairs))
    assert sorted(spots) == sorted(expected.values()), (
        "every token of the units, from its own place"
    )
    slots = slots_of(case.tokens.local.share, COUNTED)
    assert pairs.first_slot == (slots[min(expected)] if expected else None)


@given(requests())
def test_any_request_that_can_be_served_is_paired_as_its_tokens_say(
    case: Asked,
) -> None:
    check(case)


@given(broken_requests())
@example(asked([9, 8, 7], [1, 2, 3], (0, 12)))
@example(asked([0, 0, 7], [3], (0, 12)))
@example(asked([5, 6], [1, 2, 3, 4], (8, 15), blocks=(8, 4), kernels=(4, 4)))
@example(asked([9, 8, 7, 6], [1, 2, 3], (4, 8), held=16))
@example(asked([1], [2, 2], (5, 6), held=51, blocks=(16, 16), shares=EVERY_SECOND))
def test_any_change_is_paired_or_refused_as_the_tokens_say(case: Asked) -> None:
    try:
        by_tokens(case)
    except Uncovered:
        with pytest.raises(InvalidParams, match="remote_block_ids"):
            case.pair()
    else:
        check(case)


def test_a_state_is_the_last_block_that_either_side_holds() -> None:
    state = CacheGroup(policy="state", block_tokens=16)
    tokens = map_tokens(
        0, "state", tensor(block_tokens=16, blocks=9), tensor(block_tokens=4, blocks=5)
    )
    pairs = pair_units(
        tokens, state, state, RequestBlocks([[0, 0, 7]], [[2, 4, 0]], 0, 40, 40)
    )
    assert (pairs.local_block.tolist(), pairs.remote_block.tolist()) == ([7], [4])
    assert (pairs.local_position.tolist(), pairs.remote_position.tolist()) == ([0], [0])


@pytest.mark.parametrize(
    ("local", "remote", "stop", "says"),
    [
        (
            [7],
            [4],
            39,
            "expected all 40 tokens, or none: a recurrent state cannot be divided",
        ),
        ([7], [0], 40, "expected a block with the state on both sides"),
        ([], [4], 40, "expected a block with the state on both sides"),
        ([7], [5], 40, "remote_block_ids[0] is 5; expected block ids up to 4"),
        ([9], [4], 40, "local_blocks is 9; expected block ids up to 8"),
    ],
)
def test_a_state_that_is_not_there_is_refused(
    local: list[int], remote: list[int], stop: int, says: str
) -> None:
    state = CacheGroup(policy="state", block_tokens=16)
    tokens = map_tokens(
        0, "state", tensor(block_tokens=16, blocks=9), tensor(block_tokens=4, blocks=5)
    )
    with pytest.raises(InvalidParams) as refused:
        pair_units(tokens, state, state, RequestBlocks([local], [remote], 0, stop, 40))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (
            asked([9], [1, 2], (0, 4)),
            "2 blocks'; expected at most 1 blocks for 4 tokens",
        ),
        (
            asked([9, 8], [1, THERE], (0, 8)),
            f"is {THERE}; expected block ids up to {THERE - 1}",
        ),
        (asked([9, 8], [1, -2], (0, 8)), f"expected block ids up to {THERE - 1}"),
        (
            asked([9], [THERE], (0, 8), blocks=(8, 8), kernels=(4, 4)),
            f"is {THERE}; expected block ids up to",
        ),
        (
            asked([9, 8], [2], (0, 8)),
            "1 blocks'; expected blocks for all tokens from 0 to 8",
        ),
        (
            asked([9, 8], [0, 2], (0, 8)),
            "2 blocks'; expected blocks for all tokens from 0 to 8",
        ),
        (
            asked([9, 8], [1, 0], (0, 8)),
            "2 blocks'; expected blocks for all tokens from 0 to 8",
        ),
        (
            asked([9, 8, 7], [1, 2], (0, 12), 8),
            "expected at most the 8 tokens that are held",
        ),
        (
            asked([9], [1, 2], (0, 8)),
            "expected no more than 1 local blocks of 4 tokens",
        ),
    ],
)
def test_every_refusal_names_the_group_and_what_would_be_right(
    case: Asked, says: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        case.pair()
    assert refused.value.field == "remote_block_ids[0]"
    assert says in str(refused.value)


def test_a_local_block_outside_the_cache_is_refused_as_such() -> None:
    with pytest.raises(InvalidParams) as refused:
        asked([9, HERE], [1, 2], (0, 8)).pair()
    assert refused.value.field == "local_blocks[0]"


def test_a_sequence_said_to_be_huge_costs_no_memory() -> None:
    """The number of tokens is the producer's word, up to 2**28 of them."""
    case = asked([9], [1], (0, 1), 1 << 28, blocks=(1, 1))
    tracemalloc.start()
    with pytest.raises(InvalidParams):
        case.pair()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
