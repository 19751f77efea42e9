"""The benchmark of transfers: its rivals move the very pieces that a load moves, and its figures are what they say."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from bench.transfer_engine import PRODUCED, serve
from bench.transfer_loads import Loads
from bench.transfer_measure import BARE, LOAD, MEMCPY, READV, Bench, Cell, Measured, measure
from bench.transfer_memory import Memory
from bench.transfer_report import charts, tables, targets
from bench.transfer_rivals import BareNixl, kernel_reads, pieces_of
from bench.transfer_shapes import MIB, Scenario, equal_shards, unequal_shards
from bench.transfer_split import STAGES, stages

POOL_BYTES = 12 * MIB
EQUAL = equal_shards(16 << 10, MIB, POOL_BYTES, huge=True)
UNEQUAL = unequal_shards(4 << 10, MIB, POOL_BYTES, huge=True)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    device = torch.device("cpu")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=serve, args=(theirs, POOL_BYTES, 2, "cpu"))
    producer.start()
    theirs.close()
    memories = [Memory(POOL_BYTES, huge=True, device=device) for _ in range(2)]
    yield Bench(ours, *memories)
    ours.close()
    producer.join(30.0)
    assert producer.exitcode == 0


def _written(bench: Bench, call: Callable[[], Any]) -> np.ndarray:
    """Where a call writes what the producer has."""
    bench.target.tensor.zero_()
    call()
    found = bench.target.tensor.numpy()
    assert set(np.unique(found)) == {0, PRODUCED}
    return np.flatnonzero(found)


@pytest.mark.parametrize("scenario", [EQUAL, UNEQUAL], ids=lambda scenario: scenario.name)
def test_the_rivals_write_where_a_load_writes(bench: Bench, scenario: Scenario) -> None:
    address = bench.ask("scenario", scenario)
    loads = Loads(scenario, bench.target, address)
    lease, other = bench.leases(2)
    order = loads.order(lease, MIB)
    by_load = _written(bench, lambda: loads.load([order]))
    assert len(by_load) == MIB
    pieces = pieces_of(scenario, loads.peer, order, 0)
    assert sum(len(one.local) for one in pieces) == MIB // scenario.run_bytes
    bare = BareNixl(scenario, bench.target, loads.peer)
    reads = bare.reads(pieces)
    assert (_written(bench, lambda: bare.read(reads)) == by_load).all()
    assert (_written(bench, kernel_reads(address.pid, pieces, scenario.run_bytes)) == by_load).all()
    found = stages(loads.load([loads.order(other, MIB)], stamped=True).stamps, len(loads.peer.routes))
    assert list(found) == list(STAGES)
    assert all(us >= 0 for us in found.values())
    assert min(found["first fence read"], found["second fence read"]) > 0
    bare.close()
    loads.close()


def test_every_candidate_is_measured_in_every_turn_and_shown(bench: Bench) -> None:
    found = measure(bench, EQUAL, (MIB, 2 * MIB), lambda _: 2, split=(MIB,))
    (cell,) = found.cells
    assert (cell.runs, cell.posted) == (64, 64), "nothing was merged"
    assert {len(samples) for samples in cell.seconds.values()} == {2}
    assert set(cell.seconds) >= {LOAD, BARE, READV, MEMCPY}
    assert [len(one.rows) for one in tables([found])] == [1, len(STAGES) + 1]
    assert charts([found])[0].series[0].x == [EQUAL.run_bytes]


def test_a_ratio_is_taken_turn_by_turn() -> None:
    cell = Cell(MIB, {LOAD: [2.0, 30.0, 4.0], BARE: [1.0, 27.0, 3.0]}, [], runs=1, posted=1)
    assert cell.ratio(LOAD, BARE) == 0.75
    assert cell.ratio(LOAD, READV) is None
    assert cell.gb_s(BARE) == MIB / 3.0 / 1e9


def test_a_target_is_judged_by_its_worst_scenario() -> None:
    fast, slow = (Cell(MIB, {LOAD: [1.0], BARE: [ratio]}, [], runs=1, posted=1) for ratio in (0.99, 0.5))
    found = targets([Measured(EQUAL, [fast]), Measured(UNEQUAL, [slow])])
    (target,) = found
    assert (target.measured, target.met) == (0.5, False)
    assert UNEQUAL.name in target.note
