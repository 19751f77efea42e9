"""The copies through the staging pool: from the waves that a worker would read, and the relayout tables by which it
would put them in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.runs import grid
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Route
from kvferry.plan.waves import (
    SourceTable,
    SourceUnits,
    Window,
    next_window,
    source_table,
    source_units,
    window_reads,
)
from kvferry.worker.relayout.wave_table import DESTINATION, SHAPE, SOURCE, WaveTable
from kvferry.worker.staging.buffer import PreparedSource
from tests.geometry.cells import Ints
from tests.geometry.effects import CopyList

EVERYTHING = 1 << 40
"""Chunks of a wave that has room for all of a request."""


class StagedWave(NamedTuple):
    """One wave: its part of a source that has so many runs, and its copies from the producer to the consumer."""

    window: Window
    runs: int
    copies: tuple[CopyList, ...]

    @property
    def is_part_of_a_unit(self) -> bool:
        """Whether the unit's other runs are in other waves."""
        return self.window.stop_run - self.window.first_run < self.runs


def staged_waves(
    route: Route, units: Mapping[TokenMap, UnitPairs], chunks: int = EVERYTHING
) -> Iterator[StagedWave]:
    """The waves of a route's staged reads, each of at most so many chunks.

    Raises:
        AssertionError: a placement reaches out of the chunk that was read for it.
    """
    for source in route.sources:
        if not len(units[source.tokens]):
            continue
        table, wanted = (
            source_table(source, 0),
            source_units(source, units[source.tokens]),
        )
        # No fabric is asked: only what the tables say is looked at.
        prepared = PreparedSource.at_address(0, table, cast(Any, None), cast(Any, None))
        for window in _windows(table, wanted, chunks):
            copies = _wave_copies(
                route.worker,
                table,
                wanted,
                window,
                prepared.wave_table(wanted, window, 0),
            )
            yield StagedWave(window, table.runs, tuple(copies))


def _windows(table: SourceTable, wanted: SourceUnits, chunks: int) -> Iterator[Window]:
    window = next_window(table.runs, len(wanted), None, chunks)
    while window is not None:
        assert window.chunks <= max(1, chunks)
        yield window
        window = next_window(table.runs, len(wanted), window, chunks)


def _wave_copies(
    worker: int,
    table: SourceTable,
    wanted: SourceUnits,
    window: Window,
    relayout: WaveTable,
) -> Iterator[CopyList]:
    """The copies of one wave, whose first chunk is at address 0 of the pool."""
    firsts = np.cumsum(table.rows[:, 4]) - table.rows[:, 4]
    reads = window_reads(table, wanted, window)
    assert len(reads) == window.chunks
    row = np.searchsorted(firsts, reads, side="right") - 1
    # The address on the producer that each chunk of the pool was read from.
    chunks = table.rows[row, 0] + (reads - firsts[row]) * table.rows[row, 3]
    here, there = (
        relayout.units[:, :2].astype(np.int64),
        relayout.units[:, 2:].astype(np.int64),
    )
    for number, shape in enumerate(relayout.pieces.shapes):
        assert relayout.ranges[number] == (0, len(relayout.units)), (
            "every piece has all units of the wave"
        )
        pieces = relayout.rows[relayout.rows[:, SHAPE] == number]
        combinations = grid([axis.steps for axis in shape.axes])
        inner = (
            np.array([axis.source_stride for axis in shape.axes], np.int64)
            @ combinations
        )
        outer = (
            np.array([axis.destination_stride for axis in shape.axes], np.int64)
            @ combinations
        )
        # [pieces, units, combinations of the axes]
        at = (pieces[:, SOURCE, None] + here @ np.array(shape.source_unit_stride))[
            :, :, None
        ] + inner
        to = (
            pieces[:, DESTINATION, None]
            + there @ np.array(shape.destination_unit_stride)
        )[:, :, None] + outer
        src, dst = at.ravel(), cast(Ints, to.ravel())
        if not len(src):
            continue
        chunk, inside = np.divmod(src, table.run_bytes)
        assert 0 <= int(chunk.min()) <= int(chunk.max()) < len(chunks), (
            "a piece is read from outside of the wave"
        )
        assert int(inside.max()) + shape.run <= table.run_bytes, (
            "a piece reaches out of its chunk"
        )
        yield CopyList(
            worker, chunks[chunk] + inside, dst, np.full(len(src), shape.run, np.int64)
        )
