"""Runs that both sides share, against the address of every byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.run_merger import merge
from kvferry.plan.runs import Bundle, TensorSlice
from kvferry.plan.tokens import map_tokens
from kvferry.protocol.geometry import PagedTensor, Range
from tests.plan.samples import other, strides, tensor, unit_bytes

HEADS, TOKENS, CELL = 2, 4, 16


def part(
    local: PagedTensor,
    remote: PagedTensor,
    heads: Range | None = None,
    policy: str = "full",
) -> TensorSlice:
    return TensorSlice(
        local,
        remote,
        heads or local.heads,
        map_tokens(local.group, policy, local, remote),
    )


def laid_out(order: str, **changed: Any) -> PagedTensor:
    """K of `[K|V]`: two heads, four tokens a block, cells of 16 bytes, V behind it."""
    head, token = (
        (TOKENS * 2 * CELL, 2 * CELL)
        if order == "HND"
        else (2 * CELL, HEADS * 2 * CELL)
    )
    usual: dict[str, Any] = {
        "kind": "k",
        "block_stride": HEADS * TOKENS * 2 * CELL,
        "head_stride": head,
        "tile_stride": token,
        "cell_bytes": CELL,
    }
    return tensor(**{**usual, **changed})


def both(order: str, **changed: Any) -> tuple[PagedTensor, PagedTensor]:
    """K and V packed together."""
    k = laid_out(order, **changed)
    return k, other(k, kind="v", base=k.base + CELL)


def runs_of(
    found: Sequence[Bundle], here: tuple[int, int], there: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """`(local address, remote address, length)` of every descriptor of one unit: `(block, position)` on both sides."""
    for one in found:
        local = (
            here[0] * one.local_unit_stride.block_stride
            + here[1] * one.local_unit_stride.position_stride
        )
        remote = (
            there[0] * one.remote_unit_stride.block_stride
            + there[1] * one.remote_unit_stride.position_stride
        )
        for base in one.bases:
            for steps in itertools.product(*(range(axis.steps) for axis in one.axes)):
                to = sum(
                    step * axis.local_stride
                    for step, axis in zip(steps, one.axes, strict=True)
                )
                source = sum(
                    step * axis.remote_stride
                    for step, axis in zip(steps, one.axes, strict=True)
                )
                yield base[0] + local + to, base[1] + remote + source, one.run_bytes


def check(
    *parts: TensorSlice, here: tuple[int, int] = (1, 0), there: tuple[int, int] = (2, 0)
) -> tuple[Bundle, ...]:
    """The bundles, whose descriptors of one unit move every byte of it once, from its own place."""
    found = merge(parts)
    moved = [
        (to + byte, source + byte)
        for to, source, length in runs_of(found, here, there)
        for byte in range(length)
    ]
    wanted = [
        pair
        for one in parts
        for pair in zip(
            unit_bytes(one.local, one.tokens, one.heads, *here),
            unit_bytes(one.remote, one.tokens, one.heads, *there),
            strict=True,
        )
    ]
    assert sorted(moved) == sorted(wanted)
    assert sum(one.unit_bytes for one in found) == len(wanted)
    assert sum(one.unit_runs for one in found) == len(list(runs_of(found, here, there)))
    members = sorted(
        member for one in found for place in one.members for member in place
    )
    assert members == list(range(len(parts))), (
        "every part is in exactly one place of one bundle"
    )
    return found


@st.composite
def elements(draw: st.DrawFn, cell: int) -> tuple[int, int]:
    """The bytes of an element, 0 where they follow one another, and the stride as a multiple of the cell."""
    size = draw(
        st.sampled_from(
            [0, *(size for size in (1, 2, 4) if cell % size == 0 and size < cell)]
        )
    )
    return size, draw(st.integers(1, 3)) if size else 0


@st.composite
def any_parts(draw: st.DrawFn) -> list[TensorSlice]:
    """Up to three tensors with the same or other strides, side by side or apart, packed together or not."""
    parts = []
    count = draw(st.integers(1, 3))
    heads, unit = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cell = draw(st.sampled_from((1, 2, 4, 8)))
    multiples = [draw(st.integers(1, 3)) for _ in range(2)]
    wanted = Range(5, 5 + heads)
    policy = draw(st.sampled_from(("full", "full", "state")))
    sides: list[list[PagedTensor]] = []
    for multiple in multiples:
        own = Range(5 - draw(st.integers(0, 1)), 5 + heads + draw(st.integers(0, 1)))
        tokens = unit * multiple
        tiles = 1 if policy == "state" else tokens
        piece, spread = draw(elements(cell))
        packed = draw(st.booleans())
        extent = (cell // piece - 1) * spread * piece + piece if piece else cell
        width = extent * (count if packed else 1)
        block, head, tile = draw(
            strides((4, len(own), tiles), width, gaps=(0, 0, 0, 3))
        )
        apart = draw(st.sampled_from((0, 16)))
        far = max(block * 4, head * len(own), tile * tiles) + apart
        sides.append(
            [
                tensor(
                    layer=f"layers.{index}",
                    base=4096 + index * (extent if packed else far),
                    blocks=4,
                    block_tokens=tokens,
                    block_stride=block,
                    heads=own,
                    head_stride=head,
                    tile_tokens=tokens if policy == "state" else 1,
                    tile_stride=tile,
                    cell_bytes=cell,
                    element_bytes=piece,
                    element_stride=spread * piece,
                )
                for index in range(count)
            ]
        )
    for local, remote in zip(*sides, strict=True):
        parts.append(part(local, remote, wanted, policy))
    return parts


@given(parts=any_parts(), data=st.data())
def test_any_strides_give_every_byte_of_a_unit_once_and_from_its_own_place(
    parts: list[TensorSlice], data: st.DataObject
) -> None:
    tokens = parts[0].tokens
    here, there = (
        (
            data.draw(st.integers(0, 3)),
            data.draw(st.integers(0, tokens.positions(side) - 1)),
        )
        for side in (tokens.local, tokens.remote)
    )
    for one in check(*parts, here=here, there=there):
        for axis in one.axes:
            assert axis.steps > 1
            grows = axis.local_stride == one.run_bytes == axis.remote_stride
            assert not grows, "an axis that continues the run is part of it"


def test_the_worked_example_of_the_docstring() -> None:
    """K and V merge in both orders; where the orders differ, eight runs of K and V of a token remain."""
    k, v = both("HND")
    (one,) = check(part(k, k), part(v, v))
    assert (one.run_bytes, one.unit_runs, one.members) == (
        HEADS * TOKENS * 2 * CELL,
        1,
        ((0, 1),),
    )
    k_there, v_there = both("NHD")
    (one,) = check(part(k, k_there), part(v, v_there))
    assert (one.run_bytes, one.unit_runs) == (2 * CELL, 8)


def test_keys_and_values_that_are_packed_on_one_side_only_stay_apart() -> None:
    k, v = both("HND")
    apart = laid_out(
        "HND",
        head_stride=TOKENS * CELL,
        tile_stride=CELL,
        block_stride=HEADS * TOKENS * CELL,
    )
    parts = [
        part(k, apart),
        part(v, other(apart, kind="v", base=apart.base + (1 << 20))),
    ]
    (one,) = check(*parts)
    assert (one.run_bytes, one.unit_runs, one.members) == (CELL, 16, ((0,), (1,)))


def test_the_layers_of_a_blocks_first_cache_are_one_run() -> None:
    """All layers of a block together: 3 layers of 64 bytes in blocks of 192."""
    layers = [
        tensor(layer=f"{n}", base=4096 + n * 64, block_stride=192) for n in range(3)
    ]
    (one,) = check(*(part(layer, layer) for layer in layers))
    assert (one.run_bytes, one.unit_runs, one.members) == (192, 1, ((0, 1, 2),))
    there = [
        other(layer, base=1 << 30 | n << 20, block_stride=64)
        for n, layer in enumerate(layers)
    ]
    (one,) = check(
        *(part(layer, remote) for layer, remote in zip(layers, there, strict=True))
    )
    assert (one.run_bytes, one.unit_runs) == (64, 3)


@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("apart", ["here", "there", "on both sides"])
def test_a_joined_run_never_crosses_into_another_allocation(
    blocks: int, apart: str
) -> None:
    """Two layers of one block each may lie next to each other by chance: no region holds a run across both."""
    alone = tensor(blocks=blocks)
    chance = (
        alone,
        tensor(
            layer="layers.1",
            base=alone.base + blocks * alone.block_stride,
            blocks=blocks,
        ),
    )
    inside = (
        other(alone, block_stride=192),
        other(alone, layer="layers.1", block_stride=192, base=alone.base + 64),
    )
    here, there = (
        chance if apart in (side, "on both sides") else inside
        for side in ("here", "there")
    )
    (found,) = merge(
        [part(local, remote) for local, remote in zip(here, there, strict=True)]
    )
    assert found.run_bytes == 64
    assert found.bases == tuple(
        (local.base, remote.base) for local, remote in zip(here, there, strict=True)
    )


def test_whole_blocks_merge_keys_as_dim_by_tokens_with_values_as_tokens_by_dim() -> (
    None
):
    """A block of CPU attention: per head K as [D, N], then V as [N, D], all contiguous."""
    k = laid_out(
        "HND",
        head_stride=128,
        block_stride=256,
        tile_stride=2,
        element_bytes=2,
        element_stride=8,
    )
    v = laid_out(
        "HND",
        kind="v",
        base=k.base + 64,
        head_stride=128,
        block_stride=256,
        tile_stride=16,
    )
    tokens = map_tokens(k.group, "full", k, k)
    (one,) = check(
        TensorSlice(k, k, k.heads, tokens), TensorSlice(v, v, v.heads, tokens)
    )
    assert (one.run_bytes, one.unit_runs, one.members) == (256, 1, ((0, 1),))
