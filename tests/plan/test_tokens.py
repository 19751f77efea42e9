"""Which rank holds which token in which slot, by counting; and units, by what a unit is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.plan.blocks import slots_before
from kvferry.plan.tokens import (
    EVERYTHING,
    TokenSide,
    in_share,
    map_tokens,
    shared_part,
    shares_meet,
    slot_of,
    token_of,
)
from kvferry.protocol.geometry import Interleave
from tests.plan.samples import tensor, tokens_of


@st.composite
def shares(draw: st.DrawFn) -> Interleave:
    ranks = draw(st.integers(1, 6))
    return Interleave(
        ranks=ranks,
        rank=draw(st.integers(0, ranks - 1)),
        run_tokens=draw(st.integers(1, 6)),
    )


@given(shares(), st.integers(0, 120))
def test_slots_and_tokens_are_those_of_counting(share: Interleave, count: int) -> None:
    tokens = tokens_of(share, count)
    assert slot_of(share, np.array(tokens, dtype=np.int64)).tolist() == list(
        range(len(tokens))
    )
    assert token_of(share, np.arange(len(tokens))).tolist() == tokens
    assert np.flatnonzero(in_share(share, np.arange(count))).tolist() == tokens
    assert slots_before(share, count) == len(tokens)


@given(shares(), shares())
@example(
    Interleave(ranks=2, rank=0, run_tokens=2), Interleave(ranks=2, rank=1, run_tokens=2)
)
@example(
    Interleave(ranks=4, rank=3, run_tokens=1), Interleave(ranks=2, rank=1, run_tokens=2)
)
def test_two_shares_meet_when_a_token_is_in_both(
    one: Interleave, other: Interleave
) -> None:
    period = math.lcm(one.ranks * one.run_tokens, other.ranks * other.run_tokens)
    both = set(tokens_of(one, period)) & set(tokens_of(other, period))
    assert shares_meet(one, other) == bool(both)
    assert shares_meet(other, one) == bool(both)


def test_the_worked_example_of_a_unit() -> None:
    """Blocks of 16 and 24 tokens have units of 8: two positions on one side, three on the other."""
    found = map_tokens(2, "full", tensor(block_tokens=16), tensor(block_tokens=24))
    assert (found.group, found.unit_tokens, found.is_state) == (2, 8, False)
    assert (found.positions(found.local), found.positions(found.remote)) == (2, 3)


@pytest.mark.parametrize(
    ("here", "there", "unit"),
    [(16, 16, 16), (32, 16, 16), (16, 64, 16), (5, 7, 1), (1, 128, 1)],
)
def test_between_equal_shares_the_unit_is_the_largest_that_divides_both_blocks(
    here: int, there: int, unit: int
) -> None:
    assert (
        map_tokens(
            0, "full", tensor(block_tokens=here), tensor(block_tokens=there)
        ).unit_tokens
        == unit
    )
    half = Interleave(ranks=2, rank=1, run_tokens=3)
    both = (
        tensor(block_tokens=here, interleave=half),
        tensor(block_tokens=there, interleave=half),
    )
    assert map_tokens(0, "full", *both).unit_tokens == unit, (
        "an interleave that both have does not matter"
    )


@given(shares(), shares(), st.integers(1, 12), st.integers(1, 12))
def test_a_unit_lies_in_one_block_and_one_run_on_both_sides(
    one: Interleave, other: Interleave, here: int, there: int
) -> None:
    local = tensor(block_tokens=here, interleave=one)
    remote = tensor(block_tokens=there, interleave=other)
    tokens = map_tokens(0, "full", local, remote)
    unit = tokens.unit_tokens
    assert here % unit == there % unit == 0
    sides = (
        (tokens.local, tokens_of(tokens.local.share, 400)),
        (tokens.remote, tokens_of(tokens.remote.share, 400)),
    )
    slots = [{token: slot for slot, token in enumerate(order)} for _, order in sides]
    common = sorted(slots[0].keys() & slots[1].keys())
    whole = slots[0] == slots[1]
    for token in common:
        first = min(
            (t for t in common if slots[0][t] // unit == slots[0][token] // unit),
            default=token,
        )  # the unit's first token, by the local slot
        for (side, _), slot in zip(sides, slots, strict=True):
            assert slot[token] // side.block_tokens == slot[first] // side.block_tokens
            assert slot[token] - slot[first] == (
                slots[0][token] - slots[0][first] if whole else token - first
            )


def test_a_state_is_one_unit_whatever_its_blocks_are() -> None:
    found = map_tokens(
        1, "state", tensor(block_tokens=7), tensor(block_tokens=3, blocks=5)
    )
    assert found.is_state
    assert (found.positions(found.local), found.positions(found.remote)) == (1, 1)
    assert found.remote == TokenSide(block_tokens=3, blocks=5, share=EVERYTHING)


@given(one=shares(), other=shares())
def test_the_shared_part_of_the_tokens_is_that_of_a_whole_period(
    one: Interleave, other: Interleave
) -> None:
    period = one.ranks * one.run_tokens * other.ranks * other.run_tokens
    both = set(tokens_of(one, period)) & set(tokens_of(other, period))
    assert shared_part(one, other) == pytest.approx(len(both) / period)
