"""Which unit belongs in which, token by token."""

from __future__ import annotations

import math
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
    here, there = (CacheGroup(policy=policy, block_tokens=size, window_tokens=window) for size in blocks)
    sides = [
        tensor(block_tokens=kernel, blocks=count * size // kernel, interleave=share)
        for kernel, size, count, share in zip(kernels or blocks, blocks, (HERE, THERE), shares, strict=True)
    ]
    tokens = map_tokens(0, policy, *sides)
    first, stop = wanted
    request = RequestBlocks([local], [remote], first, stop, stop if held is None else held)
    return Asked(here, there, tokens, request)


def slots_of(share: Interleave, count: int) -> dict[int, int]:
    """Token → slot."""
    return {token: slot for slot, token in enumerate(tokens_of(share, count))}


class Uncovered(Exception):
    """The brute force found a token whose block is not there."""


Spot = tuple[int, int]
"""A kernel block and a slot in it."""


def spot(ids: Sequence[int], missing: int, group: CacheGroup, kernel: int, slot: int, blocks: int) -> Spot | None:
    """Where a slot is, by walking the list of blocks; None where no block is held."""
    at, inside = divmod(slot, group.block_tokens)
    if at - missing >= len(ids):
        raise Uncovered
    if at < missing or ids[at - missing] == NULL_BLOCK:
        return None
    if not 0 <= ids[at - missing] < blocks:
        raise Uncovered
    return ids[at - missing] * (group.block_tokens // kernel) + inside // kernel, inside % kernel


def by_tokens(case: Asked) -> dict[int, tuple[Spot, Spot]]:
    """Every token of every unit that holds a wanted one: where it belongs and where it comes from."""
    request, tokens = case.request, case.tokens
    local_ids, remote_ids = request.local[0], request.remote[0]
    here = slots_of(tokens.local.share, COUNTED)
    there = slots_of(tokens.remote.share, COUNTED)
    total = -(-request.num_tokens // (case.there.block_tokens * tokens.remote.share.ranks))
    missing = total - len(remote_ids)
    if missing < 0 or request.stop_token > request.num_tokens:
        raise Uncovered
    in_unit: dict[int, list[int]] = {}
    for token in here.keys() & there.keys():
        in_unit.setdefault(here[token] // tokens.unit_tokens, []).append(token)
    needed_from = request.stop_token - case.here.window_tokens + 1 if case.here.policy == "window" else 0
    found: dict[int, tuple[Spot, Spot]] = {}
    for unit in in_unit.values():
        if not any(request.first_token <= token < request.stop_token for token in unit):
            continue
        for token in unit:
            to = spot(local_ids, 0, case.here, tokens.local.block_tokens, here[token], HERE)
            if to is None:
                continue
            source = spot(remote_ids, missing, case.there, tokens.remote.block_tokens, there[token], THERE)
            if source is not None:
                found[token] = (to, source)
            elif max(unit) >= needed_from:
                raise Uncovered
    return found


def unit_spots(case: Asked, pairs: UnitPairs) -> Iterator[tuple[Spot, Spot]]:
    unit = case.tokens.unit_tokens
    columns = (pairs.local_block, pairs.local_position, pairs.remote_block, pairs.remote_position)
    for here, at, there, source in zip(*(column.tolist() for column in columns), strict=True):
        for inside in range(unit):
            yield (here, at * unit + inside), (there, source * unit + inside)


@st.composite
def interleaves(draw: st.DrawFn) -> tuple[Interleave, Interleave]:
    sides = []
    for _ in range(2):
        ranks = draw(st.sampled_from((1, 1, 2, 3)))
        run = draw(st.sampled_from((1, 2, 4)))
        sides.append(Interleave(ranks=ranks, rank=draw(st.integers(0, ranks - 1)), run_tokens=run if ranks > 1 else 1))
    return (sides[0], sides[0]) if draw(st.booleans()) else (sides[0], sides[1])


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A request that can be served: leading nulls where no block is held, and remote blocks from the first needed."""
    shares = draw(interleaves())
    kernels = tuple(draw(st.sampled_from((1, 2, 3, 4, 6))) for _ in range(2))
    # A scheduler block holds whole runs: otherwise its rank could not tell how many of its slots are used.
    least = [math.lcm(kernel, share.run_tokens) for kernel, share in zip(kernels, shares, strict=True)]
    blocks = tuple(size * draw(st.integers(1, 3)) for size in least)
    num_tokens = draw(st.integers(1, 60))
    stop = draw(st.one_of(st.just(num_tokens), st.integers(0, num_tokens)))
    first = draw(st.integers(0, stop))
    window = draw(st.sampled_from((0, 0, 2, 5, 30)))
    case = asked((), (), (first, stop), num_tokens, blocks, kernels, window, shares)  # type: ignore[arg-type]
    count = -(-stop // (blocks[0] * shares[0].ranks)) + draw(st.integers(0, 1))
    nulls = draw(st.sampled_from((0, 0, count // 2, count)))
    local = [NULL_BLOCK] * nulls + draw(st.permutations(range(1, HERE)))[: count - nulls]
    total = -(-num_tokens // (blocks[1] * shares[1].ranks))
    needed_from = max(0, stop - window + 1 if window else first)
    missing = draw(st.integers(0, min(needed_from // (blocks[1] * shares[1].ranks), total)))
    remote = draw(st.lists(st.integers(1, THERE - 1), min_size=total - missing, max_size=total - missing))
    return replace(case, request=RequestBlocks([local], [remote], first, stop, num_tokens))


@st.composite
def broken_requests(draw: st.DrawFn) -> Asked:
    """A request with one thing changed, which may or may not matter to it."""
    case = draw(requests())
    request = case.request
    local, remote, stop = list(request.local[0]), list(request.remote[0]), request.stop_token
    change = draw(st.sampled_from(("one more", "one fewer", "a null", "too high", "longer", "shorter local")))
    at = draw(st.integers(0, max(0, len(remote) - 1)))
    if change == "one more":
        remote.insert(0, 3)
    elif change == "longer":
        stop += draw(st.integers(1, 4))
    elif change == "shorter local":
        local = local[:-1]
    elif remote:
        remote[at : at + 1] = {"one fewer": [], "a null": [NULL_BLOCK], "too high": [THERE]}[change]
    return replace(case, request=RequestBlocks([local], [remote], request.first_token, stop, request.num_tokens))


def check(case: Asked) -> None:
    expected = by_tokens(case)
    pairs = case.pair()
    spots = list(unit_spots(case, pairs))
    assert sorted(spots) == sorted(expected.values()), "every token of the units, from its own place"
    slots = slots_of(case.tokens.local.share, COUNTED)
    assert pairs.first_slot == (slots[min(expected)] if expected else 0)


@given(requests())
def test_any_request_that_can_be_served_is_paired_as_its_tokens_say(case: Asked) -> None:
    check(case)


@given(broken_requests())
@example(asked([9, 8, 7], [1, 2, 3], (0, 12)))
@example(asked([0, 0, 7], [3], (0, 12)))
@example(asked([5, 6], [1, 2, 3, 4], (8, 15), blocks=(8, 4), kernels=(4, 4)))
def test_any_change_is_paired_or_refused_as_the_tokens_say(case: Asked) -> None:
    try:
        by_tokens(case)
    except Uncovered:
        with pytest.raises(InvalidParams, match="remote_block_ids"):
            case.pair()
    else:
        check(case)
