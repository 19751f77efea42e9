"""From a route to NIXL's descriptors: strided rows once per peer, index arrays once per request.

A row is one run for all blocks of a cache: `(address, length, device, stride, count)`. Where the positions of a
unit, or the tokens in it, continue through all blocks at a constant stride, they are part of the row. So preparing
costs O(tensors × slices), never O(blocks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.runs import MAX_DESCRIPTORS, Bundle, RunAxis, UnitStride, grid
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Placing, Route


@dataclass(frozen=True, slots=True)
class BundleIndex:
    """The descriptors of a bundle: run `r`, position `p`, block `b` has index `starts[r, p] + b·step`.

    Attributes:
        local_starts: int32 `[runs, local positions]`.
        remote_starts: int32 `[runs, remote positions]`.
        local_step, remote_step: descriptors per block in a row.
    """

    tokens: TokenMap
    run_bytes: int
    local_starts: np.ndarray
    remote_starts: np.ndarray
    local_step: int
    remote_step: int


@dataclass(frozen=True, slots=True)
class DescriptorTable:
    """Rows of both sides, and the place of each bundle's descriptors in them.

    Attributes:
        local_rows, remote_rows: int64 `[R, 5]`: address, length, device, stride, count.
        indices: one per bundle.
    """

    local_rows: np.ndarray
    remote_rows: np.ndarray
    indices: tuple[BundleIndex, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the table in memory."""
        starts = sum(one.local_starts.nbytes + one.remote_starts.nbytes for one in self.indices)
        return self.local_rows.nbytes + self.remote_rows.nbytes + starts


@dataclass(frozen=True, slots=True)
class DescriptorPairs:
    """One request's reads with one table: int32 `[n]` each, and their bytes."""

    local: np.ndarray
    remote: np.ndarray
    num_bytes: int


def route_tables(
    route: Route, local_device: int, remote_device: int, placing: Placing | None = None
) -> tuple[DescriptorTable, ...]:
    """The tables of a route: one, unless it has more descriptors than `MAX_DESCRIPTORS`.

    Args:
        placing: of the bundles to include; None for all of them, as if everything were direct.
    """
    tables = []
    for bundles in _portions(
        [one for one in route.bundles if placing in (None, route.placing_of(one))]
    ):
        local, remote = RowBuilder(local_device), RowBuilder(remote_device)
        indices = []
        for bundle in bundles:
            local_starts, local_step = local.add(bundle, local_side(bundle))
            remote_starts, remote_step = remote.add(bundle, remote_side(bundle))
            indices.append(
                BundleIndex(
                    bundle.tokens,
                    bundle.run_bytes,
                    local_starts,
                    remote_starts,
                    local_step,
                    remote_step,
                )
            )
        tables.append(DescriptorTable(local.array(), remote.array(), tuple(indices)))
    return tuple(tables)


def descriptor_pairs(
    table: DescriptorTable, units: Mapping[TokenMap, UnitPairs]
) -> DescriptorPairs:
    """The index arrays of one request.

    In each run the units ascend on the remote side, because NIXL merges only indices that are ascending and adjacent on
    both sides.
    """
    local: list[np.ndarray] = []
    remote: list[np.ndarray] = []
    num_bytes = 0
    for one in table.indices:
        pairs = units.get(one.tokens)
        if pairs is None or not len(pairs):
            continue
        order = _order(one, pairs)
        local.append(
            row_indices(
                one.local_starts,
                one.local_step,
                pairs.local_block[order],
                pairs.local_position[order],
            )
        )
        remote.append(
            row_indices(
                one.remote_starts,
                one.remote_step,
                pairs.remote_block[order],
                pairs.remote_position[order],
            )
        )
        num_bytes += len(local[-1]) * one.run_bytes
    if not local:
        empty = np.empty(0, dtype=np.int32)
        return DescriptorPairs(empty, empty, 0)
    return DescriptorPairs(np.concatenate(local), np.concatenate(remote), num_bytes)


def _order(one: BundleIndex, pairs: UnitPairs) -> np.ndarray:
    if one.remote_step > 1 or one.remote_starts.shape[1] == 1:
        return np.argsort(
            pairs.remote_block * one.remote_starts.shape[1] + pairs.remote_position, kind="stable"
        )
    return np.asarray(np.lexsort((pairs.remote_block, pairs.remote_position)))


def row_indices(
    starts: np.ndarray, step: int, blocks: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """The descriptors of units, run by run, int32; `starts` is `[runs, positions]`, the first descriptor of each."""
    inside = (blocks * step).astype(np.int32)
    if starts.shape[1] == 1:
        return np.asarray((starts + inside[None, :]).ravel())
    return np.asarray((starts[:, positions] + inside[None, :]).ravel())


class BundleSide(NamedTuple):
    """One side of a bundle: bases, the strides of the bundle's axes, the bytes of a run, and its unit stride."""

    run_bytes: int
    bases: np.ndarray
    strides: tuple[int, ...]
    unit_stride: UnitStride
    positions: int


def local_side(bundle: Bundle) -> BundleSide:
    """The consumer's side of a bundle."""
    bases = np.array([base for base, _ in bundle.bases], dtype=np.int64)
    strides = tuple(axis.local_stride for axis in bundle.axes)
    positions = bundle.tokens.positions(bundle.tokens.local)
    return BundleSide(bundle.local_run_bytes, bases, strides, bundle.local_unit_stride, positions)


def remote_side(bundle: Bundle) -> BundleSide:
    """The producer's side of a bundle."""
    bases = np.array([base for _, base in bundle.bases], dtype=np.int64)
    strides = tuple(axis.remote_stride for axis in bundle.axes)
    positions = bundle.tokens.positions(bundle.tokens.remote)
    return BundleSide(bundle.run_bytes, bases, strides, bundle.remote_unit_stride, positions)


class _Fold(NamedTuple):
    """The descriptors of a row within a block: `steps` in all, of which `axis_steps` of an axis for each position."""

    axis: int | None
    axis_steps: int
    steps: int


def _fold(axes: Sequence[RunAxis], side: BundleSide) -> _Fold | None:
    """The axis that continues from block to block at a constant stride, if any: it needs no rows of its own."""
    unit_stride, positions = side.unit_stride, side.positions
    if positions * unit_stride.position_stride == unit_stride.block_stride or positions == 1:
        reach = unit_stride.position_stride if positions > 1 else unit_stride.block_stride
        for index, axis in enumerate(axes):
            if axis.steps * side.strides[index] == reach:
                return _Fold(index, axis.steps, axis.steps * positions)
        if positions > 1:
            return _Fold(None, 1, positions)
    return None


class RowBuilder:
    """Builder of the rows of one side of a table."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._rows: list[np.ndarray] = []
        self._descriptors = 0

    def array(self) -> np.ndarray:
        """All rows so far, int64 `[R, 5]`."""
        return np.asarray(np.concatenate([np.empty((0, 5), dtype=np.int64), *self._rows]))

    def add(self, bundle: Bundle, side: BundleSide) -> tuple[np.ndarray, int]:
        """Add a bundle's rows.

        Returns:
            int32 `[bases × runs, positions]`, the first descriptor of each; and the descriptors per block.
        """
        unit_stride, positions = side.unit_stride, side.positions
        every = grid([axis.steps for axis in bundle.axes])
        strides = np.array(side.strides, dtype=np.int64)
        at = np.arange(positions, dtype=np.int64)
        fold = _fold(bundle.axes, side)
        if fold is None:
            step = 1
            row_of = (np.arange(every.shape[1], dtype=np.int64) * positions)[:, None] + at
            inside = np.zeros_like(row_of)
            offsets = ((strides @ every)[:, None] + at * unit_stride.position_stride).ravel()
        else:
            step = fold.steps
            others = [index for index in range(len(bundle.axes)) if index != fold.axis]
            shape = [bundle.axes[index].steps for index in others]
            none = np.zeros(every.shape[1], dtype=np.int64)
            row = np.ravel_multi_index(tuple(every[others]), shape) if shape else none
            row_of = np.repeat(row[:, None], positions, axis=1)
            inner = every[fold.axis] if fold.axis is not None else none
            inside = inner[:, None] + at * fold.axis_steps
            offsets = np.asarray(strides[others] @ grid(shape))
        per_row = unit_stride.blocks * step
        first_rows = np.arange(len(side.bases), dtype=np.int64)[:, None, None] * len(offsets)
        starts = self._descriptors + (first_rows + row_of) * per_row + inside
        rows = np.empty((len(side.bases), len(offsets), 5), dtype=np.int64)
        rows[:, :, 0] = side.bases[:, None] + offsets
        rows[:, :, 1:] = (side.run_bytes, self._device, unit_stride.block_stride // step, per_row)
        self._rows.append(rows.reshape(-1, 5))
        self._descriptors += len(side.bases) * len(offsets) * per_row
        return starts.reshape(-1, positions).astype(np.int32), step


def _portions(bundles: Sequence[Bundle]) -> Iterator[list[Bundle]]:
    """The bundles, divided so that neither side of a portion has too many descriptors."""
    portion: list[Bundle] = []
    used = 0
    for bundle in map(_countable, bundles):
        each = bundle.runs_per_place * _most_units(bundle.tokens)
        first = 0
        while first < len(bundle.bases):
            if portion and used + each > MAX_DESCRIPTORS:
                yield portion
                portion, used = [], 0
            fit = max(1, min((MAX_DESCRIPTORS - used) // each, len(bundle.bases) - first))
            stop = first + fit
            portion.append(
                replace(
                    bundle,
                    bases=bundle.bases[first:stop],
                    members=bundle.members[first:stop],
                    conversions=bundle.conversions[first:stop],
                )
            )
            used += fit * each
            first = stop
    if portion:
        yield portion


def _most_units(tokens: TokenMap) -> int:
    """Units of the larger cache: the descriptors of one run."""
    return max(tokens.positions(side) * side.blocks for side in (tokens.local, tokens.remote))


def _countable(bundle: Bundle) -> Bundle:
    """The bundle with axes unrolled into places until the descriptors of one place fit into an index."""
    units = _most_units(bundle.tokens)
    while bundle.axes and bundle.runs_per_place * units > MAX_DESCRIPTORS:
        axis, *axes = bundle.axes
        bundle = replace(
            bundle,
            axes=tuple(axes),
            bases=tuple(
                (local + step * axis.local_stride, remote + step * axis.remote_stride)
                for local, remote in bundle.bases
                for step in range(axis.steps)
            ),
            members=tuple(members for members in bundle.members for _ in range(axis.steps)),
            conversions=tuple(
                conversion for conversion in bundle.conversions for _ in range(axis.steps)
            ),
        )
    return bundle
