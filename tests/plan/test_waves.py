"""Staged reads, chunk by chunk: what goes through the pool is what direct reads would have put in place."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvferry.plan.blocks import RequestBlocks, UnitPairs, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.runs import Reading, grid
from kvferry.plan.staged_layout import Source
from kvferry.plan.transfer_plan import Placing
from kvferry.plan.waves import Window, next_window, source_table, source_units, window_reads
from tests.geometry.drawn import Drawn, drawn

Ints = npt.NDArray[np.int64]

ALWAYS_STAGED = Costs(direct_min_bytes=1 << 40, relayout_gb_s=1e12)
"""Descriptors cost so much, and the relayout so little, that every longer run is taken."""


def each_byte(starts: Ints, lengths: Ints) -> Ints:
    """The addresses of all bytes of runs, run after run."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True))])


def through_the_pool(source: Source, pairs: UnitPairs, chunks: int) -> tuple[Ints, Ints]:
    """Source and destination address of every byte that a source's waves put in place."""
    table, units = source_table(source, 0), source_units(source, pairs)
    firsts = np.cumsum(table.rows[:, 4]) - table.rows[:, 4]
    found: list[tuple[Ints, Ints]] = []
    window = next_window(table.runs, len(units), None, chunks)
    while window is not None:
        assert window.chunks <= max(1, chunks)
        reads = window_reads(table, units, window)
        row = np.searchsorted(firsts, reads, side="right") - 1
        read_from = table.rows[row, 0] + (reads - firsts[row]) * table.rows[row, 3]
        assert len(read_from) == window.chunks
        inside = (units.source_unit >= window.first_unit) & (units.source_unit < window.stop_unit)
        for placement in source.placements:
            combinations = grid([axis.steps for axis in placement.axes])
            here = np.array([axis.local_stride for axis in placement.axes], dtype=np.int64) @ combinations
            there = np.array([axis.remote_stride for axis in placement.axes], dtype=np.int64) @ combinations
            for piece in placement.pieces:
                if not window.first_run <= piece.run < window.stop_run:
                    continue
                for unit in np.flatnonzero(inside):
                    chunk = (piece.run - window.first_run) * window.units
                    chunk += int(units.source_unit[unit]) - window.first_unit
                    offset = piece.offset + int(units.places[unit, 1]) * placement.source_position_stride
                    lengths = np.full(len(here), placement.run)
                    assert (offset + there + lengths <= table.run_bytes).all(), "outside the chunk"
                    at = piece.local_base + int(units.places[unit, 2]) * placement.block_stride
                    at += int(units.places[unit, 3]) * placement.position_stride
                    found.append((each_byte(read_from[chunk] + offset + there, lengths), each_byte(at + here, lengths)))
        window = next_window(table.runs, len(units), window, chunks)
    src = np.concatenate([np.empty(0, np.int64), *(one for one, _ in found)])
    return src, np.concatenate([np.empty(0, np.int64), *(one for _, one in found)])


SEEN: Counter[str] = Counter()


@settings(max_examples=300)
@given(case=drawn(), chunks=st.integers(1, 40))
def test_what_goes_through_the_pool_is_what_direct_reads_would_put_in_place(case: Drawn, chunks: int) -> None:
    consumer, producer, request = case.consumer.description, case.producer.description, case.request
    try:
        plans = plan_engine(consumer, producer, ALWAYS_STAGED)
    except PlanRefused:
        return
    blocks = RequestBlocks(request.local, request.remote, request.first_token, request.stop_token, request.num_tokens)
    for plan in plans:
        units = pair_request(plan, consumer.groups, producer.groups, blocks)
        for route in plan.routes:
            staged = [one for one in route_copies(route, units) if one.placing is Placing.STAGED]
            src = np.concatenate([np.empty(0, np.int64), *(each_byte(one.src, one.num_bytes) for one in staged)])
            dst = np.concatenate([np.empty(0, np.int64), *(each_byte(one.dst, one.num_bytes) for one in staged)])
            moved = [through_the_pool(source, units[source.tokens], chunks) for source in route.sources]
            got_src = np.concatenate([np.empty(0, np.int64), *(one for one, _ in moved)])
            got_dst = np.concatenate([np.empty(0, np.int64), *(one for _, one in moved)])
            order, got_order = np.argsort(dst), np.argsort(got_dst)
            np.testing.assert_array_equal(got_dst[got_order], dst[order])
            np.testing.assert_array_equal(got_src[got_order], src[order])
            for source in route.sources:
                event(f"read by {source.reading.value}")
                SEEN[source.reading.value] += 1


def test_every_way_of_reading_was_drawn() -> None:
    if not SEEN:
        pytest.skip("needs the draws of the test before it")
    assert set(SEEN) == {reading.value for reading in Reading}


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (7, [(0, 3, 0, 2), (0, 3, 2, 4), (0, 3, 4, 5)]),
        (2, [w for u in range(5) for w in ((0, 2, u, u + 1), (2, 3, u, u + 1))]),
        (0, [(r, r + 1, u, u + 1) for u in range(5) for r in range(3)]),
        (99, [(0, 3, 0, 5)]),
    ],
)
def test_windows_cover_the_grid_of_the_example(chunks: int, expected: list[tuple[int, int, int, int]]) -> None:
    found, window = [], next_window(3, 5, None, chunks)
    while window is not None:
        found.append(window)
        window = next_window(3, 5, window, chunks)
    assert found == [Window(*one) for one in expected]
