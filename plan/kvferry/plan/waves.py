"""One request's staged reads, divided into waves that fit into the free part of the staging pool.

A source with `runs` runs and `units` source units is a grid of chunks. A *window* is a part of it: all runs of some
units, or, if not even one unit fits, some runs of one unit. Its chunks lie in the pool run by run, unit by unit, so
that neighbours on the producer are neighbours in the pool, where NIXL merges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.plan.blocks import UnitPairs, row_indices
from kvferry.plan.descriptors import RowBuilder, remote_side
from kvferry.plan.staged_layout import StagedSource


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The producer's rows of one source: run `r`, position `p`, block `b` has index `starts[r, p] + b·step`.

    Attributes:
        rows: int64 `[R, 5]`: address, length, device, stride, count.
        starts: int32 `[runs, positions]`.
    """

    source: StagedSource
    rows: np.ndarray
    starts: np.ndarray
    step: int

    @property
    def runs(self) -> int:
        return len(self.starts)

    @property
    def run_bytes(self) -> int:
        return self.source.bundle.run_bytes


@dataclass(frozen=True, slots=True)
class SourceUnits:
    """The units of a request that one source reads, and their places.

    Attributes:
        remote_block, remote_position: per source unit, in the order of the producer's blocks, int64 `[S]`.
        source_unit: per unit the source unit that holds it, int64 `[U]`; ascending.
        places: per unit its source unit, its position in that, its local block and its local position,
            int32 `[U, 4]`.
    """

    remote_block: np.ndarray
    remote_position: np.ndarray
    source_unit: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.remote_block)


class Window(NamedTuple):
    """Runs `[first_run, stop_run)` of the source units `[first_unit, stop_unit)`."""

    first_run: int
    stop_run: int
    first_unit: int
    stop_unit: int

    @property
    def units(self) -> int:
        return self.stop_unit - self.first_unit

    @property
    def chunks(self) -> int:
        return (self.stop_run - self.first_run) * self.units


def source_table(source: StagedSource, device: int) -> SourceTable:
    """The producer's rows of a source."""
    rows = RowBuilder(device)
    starts, step = rows.add(source.bundle, remote_side(source.bundle))
    return SourceTable(source, rows.array(), starts, step)


def source_units(source: StagedSource, pairs: UnitPairs) -> SourceUnits:
    """The units of a request that a source reads, or the whole blocks that hold them."""
    # In the order of the producer's blocks in either case: only neighbours that ascend are merged by NIXL.
    if source.whole_blocks:
        blocks, source_unit_of_pair = np.unique(pairs.remote_block, return_inverse=True)
        positions = np.zeros_like(blocks)
        order = np.argsort(source_unit_of_pair, kind="stable")
        source_unit = source_unit_of_pair[order].astype(np.int64)
        position_inside = pairs.remote_position[order]
    else:
        order = np.lexsort((pairs.remote_position, pairs.remote_block))
        blocks = pairs.remote_block[order]
        positions = pairs.remote_position[order]
        source_unit = np.arange(len(order), dtype=np.int64)
        position_inside = np.zeros_like(positions)
    columns = [
        source_unit,
        position_inside,
        pairs.local_block[order],
        pairs.local_position[order],
    ]
    return SourceUnits(
        remote_block=blocks,
        remote_position=positions,
        source_unit=source_unit,
        places=np.stack(columns, axis=1).astype(np.int32),
    )


def next_window(
    runs: int, units: int, last: Window | None, chunks: int
) -> Window | None:
    """The window after `last` (None at the beginning), of at most `chunks` chunks; None at the end.

    Example: 3 runs, 5 units. With 7 chunks: all runs of units 0 and 1, then of 2 and 3, then of 4. With 2 chunks: runs
    0 and 1 of unit 0, run 2 of unit 0, runs 0 and 1 of unit 1, …
    """
    run = 0
    unit = 0
    if last is not None and last.stop_run == runs:
        unit = last.stop_unit
    elif last is not None:
        run = last.stop_run
        unit = last.first_unit
    if unit >= units or not runs:
        return None
    if run == 0 and chunks >= runs:
        return Window(0, runs, unit, min(units, unit + chunks // runs))
    return Window(run, min(runs, run + max(1, chunks)), unit, unit + 1)


def window_reads(table: SourceTable, units: SourceUnits, window: Window) -> np.ndarray:
    """The producer's descriptors of a window, int32 `[chunks]`, in the order of its chunks."""
    own = slice(window.first_unit, window.stop_unit)
    starts = table.starts[window.first_run : window.stop_run]
    return row_indices(
        starts, table.step, units.remote_block[own], units.remote_position[own]
    )
