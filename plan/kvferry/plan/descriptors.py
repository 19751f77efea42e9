"""From a route to NIXL's descriptors: strided rows, once per peer. The index arrays of a request are made from them in
`plan/blocks.py`.

A row is one run for all blocks of a cache: `(address, length, device, stride, count)`. Where the positions of a
unit, or the tokens in it, continue through all blocks at a constant stride, they are part of the row. So preparing
costs O(tensors × slices), never O(blocks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.plan.runs import Bundle, RunAxis, UnitStride, grid
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
        num_bytes = self.local_rows.nbytes + self.remote_rows.nbytes
        for index in self.indices:
            num_bytes += index.local_starts.nbytes + index.remote_starts.nbytes
        return num_bytes


def route_table(
    route: Route, local_device: int, remote_device: int, placing: Placing | None = None
) -> DescriptorTable | None:
    """The table of a route; None if nothing of it is placed so.

    A plan has `MAX_DESCRIPTORS` at most, all routes together (`plan_transfer`), so every index fits into 31 bits.

    Args:
        placing: of the bundles to include; None for all of them, as if everything were direct.
    """
    bundles = [
        bundle
        for bundle in route.bundles
        if placing in (None, route.placing_of(bundle))
    ]
    if not bundles:
        return None
    local = RowBuilder(local_device)
    remote = RowBuilder(remote_device)
    indices: list[BundleIndex] = []
    for bundle in bundles:
        local_starts, local_step = local.add(bundle, local_side(bundle))
        remote_starts, remote_step = remote.add(bundle, remote_side(bundle))
        index = BundleIndex(
            tokens=bundle.tokens,
            run_bytes=bundle.run_bytes,
            local_starts=local_starts,
            remote_starts=remote_starts,
            local_step=local_step,
            remote_step=remote_step,
        )
        indices.append(index)
    return DescriptorTable(local.array(), remote.array(), tuple(indices))


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
    return BundleSide(
        bundle.local_run_bytes, bases, strides, bundle.local_unit_stride, positions
    )


def remote_side(bundle: Bundle) -> BundleSide:
    """The producer's side of a bundle."""
    bases = np.array([base for _, base in bundle.bases], dtype=np.int64)
    strides = tuple(axis.remote_stride for axis in bundle.axes)
    positions = bundle.tokens.positions(bundle.tokens.remote)
    return BundleSide(
        bundle.run_bytes, bases, strides, bundle.remote_unit_stride, positions
    )


class _Fold(NamedTuple):
    """The descriptors of a row within a block: `steps` in all, of which `axis_steps` of an axis for each position."""

    axis: int | None
    axis_steps: int
    steps: int


def _fold(axes: Sequence[RunAxis], side: BundleSide) -> _Fold | None:
    """The axis that continues from block to block at a constant stride, if any: it needs no rows of its own."""
    block_stride, position_stride, _ = side.unit_stride
    positions = side.positions
    if positions == 1:
        reach = block_stride
    elif positions * position_stride == block_stride:
        reach = position_stride
    else:
        return None
    for index, axis in enumerate(axes):
        if axis.steps * side.strides[index] == reach:
            return _Fold(index, axis.steps, axis.steps * positions)
    if positions == 1:
        return None
    return _Fold(None, 1, positions)


class RowBuilder:
    """Builder of the rows of one side of a table."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._rows: list[np.ndarray] = []
        self._descriptors = 0

    def array(self) -> np.ndarray:
        """All rows so far, int64 `[R, 5]`."""
        return np.asarray(
            np.concatenate([np.empty((0, 5), dtype=np.int64), *self._rows])
        )

    def add(self, bundle: Bundle, side: BundleSide) -> tuple[np.ndarray, int]:
        """Add a bundle's rows.

        Returns:
            int32 `[bases × runs, positions]`, the first descriptor of each; and the descriptors per block.
        """
        bases = len(side.bases)
        layout = _row_layout(bundle, side)
        rows_per_base = len(layout.offsets)
        descriptors_per_row = side.unit_stride.blocks * layout.step
        # Of every base its rows follow one another.
        first_row = np.arange(bases, dtype=np.int64)[:, None, None] * rows_per_base
        row_starts = (first_row + layout.row) * descriptors_per_row
        starts = self._descriptors + row_starts + layout.number_in_row
        stride = side.unit_stride.block_stride // layout.step
        rows = np.empty((bases, rows_per_base, 5), dtype=np.int64)
        rows[:, :, 0] = side.bases[:, None] + layout.offsets
        rows[:, :, 1:] = (side.run_bytes, self._device, stride, descriptors_per_row)
        self._rows.append(rows.reshape(-1, 5))
        self._descriptors += bases * rows_per_base * descriptors_per_row
        return starts.reshape(-1, side.positions).astype(np.int32), layout.step


class _RowLayout(NamedTuple):
    """Where the runs of one base are in its rows.

    Attributes:
        offsets: per row, bytes from the base.
        row: `[runs, positions]`, the row.
        number_in_row: `[runs, positions]`, the descriptor in it, in block 0.
        step: descriptors per block in a row.
    """

    offsets: np.ndarray
    row: np.ndarray
    number_in_row: np.ndarray
    step: int


def _row_layout(bundle: Bundle, side: BundleSide) -> _RowLayout:
    combinations = grid([axis.steps for axis in bundle.axes])
    strides = np.array(side.strides, dtype=np.int64)
    runs = combinations.shape[1]
    positions = np.arange(side.positions, dtype=np.int64)
    fold = _fold(bundle.axes, side)
    if fold is None:
        # A row for every run and position.
        row = np.arange(runs, dtype=np.int64)[:, None] * side.positions + positions
        run_offsets = (strides @ combinations)[:, None]
        offsets = run_offsets + positions * side.unit_stride.position_stride
        return _RowLayout(offsets.ravel(), row, np.zeros_like(row), step=1)
    # A row for every combination of the axes that are not folded.
    other_axes = [index for index in range(len(bundle.axes)) if index != fold.axis]
    shape = [bundle.axes[index].steps for index in other_axes]
    row_of_run = np.zeros(runs, dtype=np.int64)
    if shape:
        row_of_run = np.asarray(
            np.ravel_multi_index(tuple(combinations[other_axes]), shape)
        )
    step_of_run = np.zeros(runs, dtype=np.int64)
    if fold.axis is not None:
        step_of_run = combinations[fold.axis]
    return _RowLayout(
        offsets=np.asarray(strides[other_axes] @ grid(shape)),
        row=np.repeat(row_of_run[:, None], side.positions, axis=1),
        number_in_row=step_of_run[:, None] + positions * fold.axis_steps,
        step=fold.steps,
    )
