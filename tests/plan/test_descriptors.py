"""Descriptors, expanded as NIXL expands them, against the address of every byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.blocks import DescriptorPairs, UnitPairs, descriptor_pairs
from kvferry.plan.descriptors import (
    DescriptorTable,
    route_table,
)
from kvferry.plan.planner import plan_transfer
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Route
from kvferry.protocol.geometry import PagedTensor, Range
from kvferry.protocol.handshake import CacheGroup
from tests.draws import draws
from tests.plan.samples import engine, other, span, strides, tensor, unit_bytes

FAR = 1 << 40


def route_of(
    *pairs: tuple[PagedTensor, PagedTensor],
    policies: tuple[str, ...] = ("full", "full"),
) -> Route:
    """The only route of a consumer with the tensors on the left and a producer with those on the right."""
    groups = tuple(CacheGroup(policy=policy, block_tokens=5040) for policy in policies)
    sides = [
        engine(*(pair[side] for pair in pairs), groups=groups) for side in range(2)
    ]
    (route,) = plan_transfer(sides[0], 0, sides[1]).routes
    return route


def table_of(
    route: Route, local_device: int = 0, remote_device: int = 0
) -> DescriptorTable:
    """All of a route as one table."""
    table = route_table(route, local_device, remote_device)
    assert table is not None
    return table


def units_of(pairs: list[tuple[int, int, int, int]]) -> UnitPairs:
    """Units as `(local block, local position, remote block, remote position)`."""
    columns = np.array(pairs, dtype=np.int64).reshape(-1, 4)
    return UnitPairs(columns[:, [2, 3, 0, 1]])


def expand(rows: np.ndarray) -> list[tuple[int, int]]:
    """`(address, length)` of every descriptor, in NIXL's order: row by row, `count` of each, `stride` apart."""
    return [
        (a + step * stride, n)
        for a, n, _, stride, count in rows.tolist()
        for step in range(count)
    ]


def bytes_moved(
    table: DescriptorTable, wanted: DescriptorPairs
) -> Iterator[tuple[int, int]]:
    """`(local address, remote address)` of every byte that a read of these pairs moves."""
    here, there = expand(table.local_rows), expand(table.remote_rows)
    for left, right in zip(wanted.local.tolist(), wanted.remote.tolist(), strict=True):
        (to, length), (source, same) = here[left], there[right]
        assert length == same
        yield from ((to + byte, source + byte) for byte in range(length))


def wanted_bytes(route: Route, units: Mapping[TokenMap, UnitPairs]) -> dict[int, int]:
    """Where every byte of every wanted unit comes from."""
    found: dict[int, int] = {}
    for item in route.slices:
        if item.tokens not in units:
            continue
        one = units[item.tokens]
        columns = (
            one.local_block,
            one.local_position,
            one.remote_block,
            one.remote_position,
        )
        for here, at, there, source in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            to = unit_bytes(item.local, item.tokens, item.heads, here, at)
            found.update(
                zip(
                    to,
                    unit_bytes(item.remote, item.tokens, item.heads, there, source),
                    strict=True,
                )
            )
    return found


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Up to three tensors in up to two groups, each side with its own strides, blocks and place in memory."""
    pairs = []
    bases = [4096, FAR]
    policies = (draw(st.sampled_from(("full", "state"))), "full")
    shapes = [
        [(draw(st.integers(1, 5)), draw(st.integers(1, 3))) for _ in range(2)]
        for _ in policies
    ]
    unit = draw(st.integers(1, 2))
    for layer in range(draw(st.integers(1, 3))):
        group = draw(st.integers(0, 1))
        heads, cell = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 4)))
        sides = []
        for side in range(2):
            blocks, multiple = shapes[group][side]
            tokens = unit * multiple
            tiles = 1 if policies[group] == "state" else tokens
            held = Range(2 - draw(st.integers(0, 1)) * side, 2 + heads)
            block, head, tile = draw(
                strides((blocks, len(held), tiles), cell, gaps=(0, 0, 3))
            )
            one = tensor(
                layer=f"layers.{layer}",
                group=group,
                base=bases[side],
                blocks=blocks,
                block_tokens=tokens,
                block_stride=block,
                heads=held,
                head_stride=head,
                tile_tokens=tokens // tiles,
                tile_stride=tile,
                cell_bytes=cell,
            )
            bases[side] += span(one)
            sides.append(one)
        pairs.append((sides[0], sides[1]))
    return route_of(*pairs, policies=policies)


@st.composite
def unit_pairs(draw: st.DrawFn, route: Route) -> dict[TokenMap, UnitPairs]:
    """For some of the token maps, units in any order; each local one at most once."""
    chosen = {}
    maps = sorted(
        {item.tokens for item in route.slices}, key=lambda tokens: tokens.group
    )
    for tokens in maps:
        if not draw(st.booleans()) and len(maps) > 1:
            continue
        spots = [
            [
                (block, at)
                for block in range(side.blocks)
                for at in range(tokens.positions(side))
            ]
            for side in (tokens.local, tokens.remote)
        ]
        here = draw(st.lists(st.sampled_from(spots[0]), unique=True, max_size=6))
        chosen[tokens] = units_of(
            [(*spot, *draw(st.sampled_from(spots[1]))) for spot in here]
        )
    return chosen


@given(route=routes(), data=st.data())
@settings(max_examples=draws(100))
def test_every_wanted_byte_is_read_once_from_its_place_and_nothing_else_is(
    route: Route, data: st.DataObject
) -> None:
    units = data.draw(unit_pairs(route))
    table = table_of(route)
    pairs = descriptor_pairs(table, units)
    moved = list(bytes_moved(table, pairs))
    assert not [
        address
        for address, times in Counter(to for to, _ in moved).items()
        if times > 1
    ]
    assert dict(moved) == wanted_bytes(route, units)
    assert pairs.num_bytes == len(moved)
    assert {str(pairs.local.dtype), str(pairs.remote.dtype)} == {"int32"}


@given(route=routes(), data=st.data())
@settings(max_examples=draws(100))
def test_within_a_run_the_remote_indices_ascend_so_that_nixl_can_merge(
    route: Route, data: st.DataObject
) -> None:
    units = data.draw(unit_pairs(route))
    table = table_of(route)
    pairs = descriptor_pairs(table, units)
    at = 0
    for index in table.indices:
        count = len(units[index.tokens]) if index.tokens in units else 0
        runs = len(index.remote_starts)
        part = pairs.remote[at : at + runs * count].reshape(runs, count)
        assert (np.diff(part, axis=1) >= 0).all()
        at += runs * count
    assert at == len(pairs.remote)


def test_rows_are_address_length_device_stride_and_count_of_each_run() -> None:
    local, remote = (
        tensor(blocks=8),
        tensor(base=FAR, blocks=3, block_stride=128, head_stride=40),
    )
    table = table_of(route_of((local, remote)), local_device=2, remote_device=5)
    assert table.local_rows.tolist() == [[4096, 32, 2, 32, 16]], (
        "two heads of a dense block at one distance"
    )
    assert table.remote_rows.tolist() == [
        [FAR, 32, 5, 128, 3],
        [FAR + 40, 32, 5, 128, 3],
    ]
    assert table.local_rows.dtype == np.int64
    (index,) = table.indices
    assert (index.local_starts.tolist(), index.local_step) == ([[0], [1]], 2)
    assert (index.remote_starts.tolist(), index.remote_step) == ([[0], [3]], 1)


def test_a_table_grows_with_tensors_and_runs_but_not_with_blocks() -> None:
    few = table_of(route_of((tensor(blocks=1), tensor(blocks=1))))
    many = table_of(route_of((tensor(blocks=1 << 20), tensor(blocks=1 << 20))))
    assert few.local_rows.shape == many.local_rows.shape == (1, 5)
    assert few.num_bytes == many.num_bytes == 2 * 5 * 8 + 2 * 4


def check_table(table: DescriptorTable) -> None:
    for rows in (table.local_rows, table.remote_rows):
        assert 0 < int(rows[:, 4].sum()) <= (1 << 31) - 1


def descriptor(rows: np.ndarray, index: int) -> tuple[int, int]:
    """Address and length of one descriptor among more than can be expanded."""
    for address, length, _, stride, count in rows.tolist():
        if index < count:
            return address + index * stride, length
        index -= count
    raise IndexError


def moved_by(
    table: DescriptorTable, units: Mapping[TokenMap, UnitPairs]
) -> dict[int, int]:
    """Local address → remote address of every byte that a few units need, by a table of any size."""
    moved: dict[int, int] = {}
    check_table(table)
    pairs = descriptor_pairs(table, units)
    for here, there in zip(pairs.local.tolist(), pairs.remote.tolist(), strict=True):
        (to, length), (source, same) = (
            descriptor(table.local_rows, here),
            descriptor(table.remote_rows, there),
        )
        assert length == same
        moved.update((to + byte, source + byte) for byte in range(length))
    return moved


def test_no_index_wraps_around_in_the_largest_table() -> None:
    """Eight runs a block and 2**28 - 1 blocks: eight descriptors below the limit of a plan, 2**31 - 1."""
    blocks = (1 << 28) - 1
    local = tensor(blocks=blocks, block_stride=128)
    route = route_of((local, other(local, base=FAR, head_stride=8, tile_stride=16)))
    table = table_of(route)
    units = {route.slices[0].tokens: units_of([(blocks - 1, 0, blocks - 2, 0)])}
    assert moved_by(table, units) == wanted_bytes(route, units)
    assert int(descriptor_pairs(table, units).local.max()) == 8 * blocks - 1
