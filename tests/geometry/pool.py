"""What goes through the staging pool, as elementary copies: expanded from what a worker would read and put in place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.bundles import grid
from kvferry.plan.staging import Source
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Route
from kvferry.plan.waves import next_window, source_table, source_units, window_reads
from tests.geometry.cells import Ints
from tests.geometry.effects import CopyList

_EVERYTHING = 1 << 40
"""Chunks of a window that has room for all of a request."""


def staged_copies(route: Route, units: Mapping[TokenMap, UnitPairs]) -> list[CopyList]:
    """The copies of a route's staged reads, from the producer's memory to the consumer's.

    Raises:
        AssertionError: a placement reaches out of the chunk that was read for it.
    """
    return [
        found
        for source in route.sources
        if len(units[source.tokens])
        for found in _source_copies(route.worker, source, units[source.tokens])
    ]


def _source_copies(worker: int, source: Source, pairs: UnitPairs) -> list[CopyList]:
    table, wanted = source_table(source, 0), source_units(source, pairs)
    window = next_window(table.runs, len(wanted), None, _EVERYTHING)
    assert window is not None
    firsts = np.cumsum(table.rows[:, 4]) - table.rows[:, 4]
    reads = window_reads(table, wanted, window)
    row = np.searchsorted(firsts, reads, side="right") - 1
    # The address that chunk (run, source unit) was read from.
    chunks = (table.rows[row, 0] + (reads - firsts[row]) * table.rows[row, 3]).reshape(table.runs, window.units)
    found = []
    for placement in source.placements:
        # [pieces, units, combinations of the axes]
        run, offset, base = (np.array([piece[i] for piece in placement.pieces], np.int64) for i in range(3))
        combinations = grid([axis.steps for axis in placement.axes])
        here = np.array([axis.local_stride for axis in placement.axes], np.int64) @ combinations
        there = np.array([axis.remote_stride for axis in placement.axes], np.int64) @ combinations
        position = wanted.source_position * placement.source_position_stride
        inside = offset[:, None, None] + position[None, :, None] + there[None, None, :]
        assert int(inside.min()) >= 0, "a piece begins before its chunk"
        assert int(inside.max()) + placement.run <= table.run_bytes, "a piece reaches out of its chunk"
        at = wanted.local_block * placement.block_stride + wanted.local_position * placement.position_stride
        src: Ints = (chunks[run][:, wanted.source_unit][:, :, None] + inside).ravel()
        dst: Ints = (base[:, None, None] + at[None, :, None] + here[None, None, :]).ravel()
        found.append(CopyList(worker, src, dst, np.full(len(src), placement.run, np.int64)))
    return found
