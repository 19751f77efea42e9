"""The benchmark of transfers: its rivals move the very pieces that a load moves, and its figures are what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from bench.transfer import BARE, FENCED, LOAD, LOADS, MEMCPY, charts, measure, table
from bench.transfer_engines import PRODUCED, Bench, two_processes
from bench.transfer_loads import connected
from bench.transfer_rivals import BareNixl, pieces_of
from bench.transfer_shapes import MIB, Scenario, equal_shards, unequal_shards

POOL_BYTES = 12 * MIB
EQUAL = equal_shards(16 << 10, MIB, POOL_BYTES)
UNEQUAL = unequal_shards(4 << 10, MIB, POOL_BYTES)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with two_processes(POOL_BYTES, 2, "cpu") as made:
        yield made


def _written(bench: Bench, call: Callable[[], Any]) -> np.ndarray:
    """Where a call writes what the producer has."""
    bench.target.zero_()
    call()
    found = bench.target.numpy()
    assert set(np.unique(found)) == {0, PRODUCED}
    return np.flatnonzero(found)


@pytest.mark.parametrize(
    "scenario", [EQUAL, UNEQUAL], ids=lambda scenario: scenario.name
)
def test_the_bare_loop_writes_where_a_load_writes(
    bench: Bench, scenario: Scenario
) -> None:
    with (
        connected(bench, scenario, MIB) as loads,
        closing(BareNixl(bench.target, loads.peer)) as bare,
    ):
        order = loads.order(bench.leases(1)[0], MIB)
        by_load = _written(bench, lambda: loads.load([order]))
        assert len(by_load) == MIB
        pieces = pieces_of(scenario, loads.peer, order, 0)
        assert sum(len(one.local) for one in pieces) == MIB // scenario.run_bytes
        reads = bare.reads(pieces)
        assert (_written(bench, lambda: bare.read(reads)) == by_load).all()
        assert (_written(bench, lambda: bare.read_fenced(reads)) == by_load).all()


def test_every_candidate_is_measured_in_every_turn_and_shown(bench: Bench) -> None:
    (found,) = measure(bench, EQUAL, (MIB, 2 * MIB), lambda _: 2)
    assert (found.runs, found.posted) == (64, 64), "nothing was merged"
    assert {len(samples) for samples in found.seconds.values()} == {2}
    assert set(found.seconds) >= {LOAD, LOADS, BARE, FENCED, MEMCPY}
    assert len(table([found]).rows) == 1
    assert charts([found])[0].series[0].x == [EQUAL.run_bytes]
