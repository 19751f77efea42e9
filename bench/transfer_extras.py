"""Questions beside the main grid of `bench.transfer`: shared posts, scattered blocks, what a held lease costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.figures import Table
from bench.transfer_loads import Loads
from bench.transfer_measure import Bench
from bench.transfer_rivals import BareNixl, Pieces, pieces_of
from bench.transfer_shapes import MIB, Scenario, equal_shards, shown_bytes

_REQUESTS = 8
_IDLE_S = 3.0


def extras(bench: Bench, pool_bytes: int, *, huge: bool, turns: int) -> list[Table]:
    """All of them, over equal shards with runs of 4 KiB."""
    scenario = equal_shards(4096, 16 * MIB, pool_bytes, huge=huge)
    address = bench.ask("scenario", scenario)
    idle = bench.ask("idle_cpu", _IDLE_S)
    loads = Loads(scenario, bench.target, address)
    bare: BareNixl | None = None
    try:
        loads.load([loads.order(bench.leases(1)[0], MIB)])
        bare = BareNixl(scenario, bench.target, loads.peer)
        tables = [_shared_post(bench, loads, bare, turns)]
        if bench.target.device.type == "cpu":
            tables.append(_scattered(bench, loads, bare, turns))
        bench.leases(1)
        held = bench.ask("idle_cpu", _IDLE_S)
    finally:
        loads.close()
        if bare is not None:
            bare.close()
    tables.append(Table("CPU time of an idle producer, of a core", ("leases held", "cores"), ((0, idle), (1, held))))
    return tables


def _shared_post(bench: Bench, loads: Loads, bare: BareNixl, turns: int) -> Table:
    """Eight small requests to one peer: a post each, or one for all of them."""
    rows = []
    for size in (128 * 1024, 512 * 1024):
        orders = [loads.order(bench.leases(1)[0], size, share) for share in range(_REQUESTS)]
        pieces = [pieces_of(loads.scenario, loads.peer, order, 0) for order in orders]
        each = [one for several in pieces for one in bare.reads(several)]
        shared = bare.reads([_joined([one for several in pieces for one in several])])
        took = _in_turn(
            turns,
            {
                "each": partial(bare.read, each),
                "shared": partial(bare.read, shared),
            },
        )
        whole = statistics.median(
            loads.load([loads.order(lease, size, share) for share, lease in enumerate(bench.leases(_REQUESTS))]).seconds
            for _ in range(turns)
        )
        saved = took["each"] - took["shared"]
        rows.append(
            (shown_bytes(size), took["each"] * 1e6, took["shared"] * 1e6, saved * 1e6, whole * 1e6, saved / whole)
        )
    columns = ("request", "8 posts, µs", "1 post, µs", "saved, µs", "8 loads of kvferry, µs", "saved, of these")
    return Table("Eight small requests to one peer, bare NIXL: a post each or one for all", columns, rows)


def _scattered(bench: Bench, loads: Loads, bare: BareNixl, turns: int) -> Table:
    """Blocks that follow one another on the producer only: read one by one into place, or merged and then put there."""
    scenario, rows = loads.scenario, []
    size = 4 * MIB
    run = scenario.run_bytes
    pieces = pieces_of(scenario, loads.peer, loads.order(bench.leases(1)[0], size), 0)[0]
    ascending = _ascending(scenario, pieces)
    runs = bench.target.array(run)
    places = ((pieces.local_addresses - bench.target.address) // run).astype(np.intp)
    merged_at = ((ascending.local_addresses - bench.target.address) // run).astype(np.intp)
    direct, staged = bare.reads([_mixed(pieces, ascending)]), bare.reads([ascending])

    def read_and_place() -> None:
        bare.read(staged)
        runs[places] = runs[merged_at]

    took = _in_turn(
        turns,
        {
            "scattered on both sides, in place": partial(bare.read, bare.reads([pieces])),
            "scattered on the consumer only, in place": partial(bare.read, direct),
            "scattered on the consumer only, read merged and then put in place": read_and_place,
            "scattered nowhere": partial(bare.read, staged),
        },
    )
    rows = [(name, seconds * 1e6, size / seconds / 1e9) for name, seconds in took.items()]
    return Table(f"{shown_bytes(size)} in runs of {shown_bytes(run)}, bare NIXL", ("blocks", "µs", "GB/s"), rows)


def _joined(pieces: list[Pieces]) -> Pieces:
    first = pieces[0]
    local, remote = (np.concatenate([getattr(one, side) for one in pieces]) for side in ("local", "remote"))
    return Pieces(first.table, first.worker, first.number, local, remote)


def _ascending(scenario: Scenario, pieces: Pieces) -> Pieces:
    """As many pieces, adjacent on both sides within each layer."""
    per_layer, layers = len(pieces.local) // scenario.layers, np.arange(scenario.layers, dtype=np.int32)

    def side(blocks: int) -> np.ndarray:
        first = layers * blocks + 1
        return np.asarray((first[:, None] + np.arange(per_layer, dtype=np.int32)).ravel().astype(np.int32))

    local, remote = side(scenario.blocks(scenario.consumer)), side(scenario.blocks(scenario.producer))
    return Pieces(pieces.table, pieces.worker, pieces.number, local, remote)


def _mixed(local: Pieces, remote: Pieces) -> Pieces:
    return Pieces(local.table, local.worker, local.number, local.local, remote.remote)


def _in_turn(turns: int, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians, s; the calls take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            begun_s = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - begun_s)
    return {name: statistics.median(found) for name, found in samples.items()}
