"""Throughput of loads between two processes on real NIXL, beside what lies beneath: a few minutes, `--quick` one.

    python -m bench.transfer
    python -m bench.transfer --quick
    python -m bench.transfer --device cuda

A load is a whole one, through a worker and its transfer thread: from the order to the result, with both reads of the
lease's slot, the check of the MAC, and the notification of the producer. In the same run, in turn with it: a bare NIXL
loop with one agent and the very same descriptors (make, post, poll, release, index arrays at hand), and memcpy of as
many pieces within one process. With `--device cuda` the caches are in the memory of one GPU, where only
`--quick` has run, before kvferry let UCX read over CUDA IPC (docs/operations.md).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from bench.command import command, measure_and_publish
from bench.figures import (
    Cell,
    Chart,
    Results,
    Series,
    Table,
    Target,
    shown_bytes,
)
from bench.transfer_engines import (
    Bench,
    Lease,
    huge_bytes_at,
    two_processes,
    use_huge_pages,
)
from bench.transfer_loads import Loads, connected
from bench.transfer_rivals import BareNixl, memory_copies, pieces_of
from bench.transfer_shapes import (
    MIB,
    Scenario,
    equal_shards,
    other_layout,
    unequal_shards,
)

RUNS = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB)
SIZES = tuple(size * MIB for size in (1, 4, 16, 64, 256))
QUICK_RUNS = (4 << 10, 64 << 10, MIB)
QUICK_SIZES = tuple(size * MIB for size in (1, 16, 64))
AT_ONCE = 4
OF_BARE, OF_MEMCPY = 0.95, 0.8
LOAD, LOADS, BARE, BARES, FENCED, MEMCPY = (
    "kvferry, one load",
    "kvferry, four at once",
    "bare NIXL",
    "bare NIXL, four at once",
    "bare NIXL with fence and message",
    "memcpy",
)
NO_LEASE = Lease(0, "0" * 14 + "1", "none")
"""For orders that only say which blocks."""
WHAT = (
    "Throughput of whole loads between two processes: from the order to the result, with both reads of the lease's "
    "slot, the check of the MAC and the notification of the producer. Beside it, in turn, a bare NIXL loop with the "
    "same descriptors and one agent, and memcpy of as many pieces within one process."
)


@dataclass(frozen=True)
class Measured:
    """A request size of a scenario.

    Attributes:
        seconds: samples per candidate and request, in the order in which they were taken: the candidates took turns.
        runs: descriptors, before NIXL merges any.
        posted: descriptors as NIXL counted them.
    """

    scenario: Scenario
    request_bytes: int
    seconds: dict[str, list[float]]
    runs: int
    posted: int

    def rates(self, name: str) -> list[float]:
        """GB/s of every turn."""
        return [self.request_bytes / second / 1e9 for second in self.seconds[name]]

    def ratio(self, name: str, to: str) -> float:
        """How fast one candidate is, of another: the median over the turns, in each of which both were measured."""
        return statistics.median(
            y / x for x, y in zip(self.seconds[name], self.seconds[to], strict=True)
        )


def scenarios(runs: Sequence[int], most_bytes: int, pool_bytes: int) -> list[Scenario]:
    """Equal shards by run length, unequal ones, and layouts that differ."""
    found = [equal_shards(run, most_bytes, pool_bytes) for run in runs]
    found += [
        unequal_shards(run, most_bytes, pool_bytes) for run in (4 << 10, 64 << 10)
    ]
    return found + [
        other_layout(256, most_bytes, pool_bytes, staged=staged)
        for staged in (False, True)
    ]


def turns_of(request_bytes: int, quick: bool) -> int:
    """Turns of every candidate: more where one takes little."""
    most = {1: 31, 4: 21, 16: 15, 64: 9}.get(request_bytes // MIB, 5)
    return max(3, most // 3) if quick else most


def measure(
    bench: Bench, scenario: Scenario, sizes: Sequence[int], turns: Callable[[int], int]
) -> list[Measured]:
    """All sizes that the scenario goes up to, each with so many turns of every candidate."""
    with (
        connected(bench, scenario, MIB) as loads,
        closing(BareNixl(bench.target, loads.peer)) as bare,
    ):
        return [
            _measure(bench, loads, bare, size, turns(size))
            for size in sizes
            if size <= scenario.most_bytes
        ]


def _measure(
    bench: Bench, loads: Loads, bare: BareNixl, size: int, turns: int
) -> Measured:
    device = bench.target.device.index or 0
    shares = [
        pieces_of(
            loads.scenario, loads.peer, loads.order(NO_LEASE, size, share), device
        )
        for share in range(AT_ONCE)
    ]
    reads = [bare.reads(pieces) for pieces in shares]
    all_reads = [one for several in reads for one in several]
    runs = sum(len(one.local) for one in shares[0])
    copy = memory_copies(bench.source, bench.target, loads.scenario.run_bytes, runs)
    leases = bench.leases((turns + 1) * (1 + AT_ONCE))
    seconds = in_turn(
        turns,
        {
            LOAD: lambda: loads.load([loads.order(leases.pop(), size)]),
            LOADS: lambda: (
                loads.load([loads.order(leases.pop(), size, x) for x in range(AT_ONCE)])
                / AT_ONCE
            ),
            BARE: lambda: timed(lambda: bare.read(reads[0])),
            BARES: lambda: timed(lambda: bare.read(all_reads)) / AT_ONCE,
            FENCED: lambda: timed(lambda: bare.read_fenced(reads[0])),
            MEMCPY: lambda: timed(copy),
        },
    )
    loads.load([loads.order(bench.leases(1)[0], size)])
    return Measured(loads.scenario, size, seconds, runs, loads.records[0].descriptors)


def in_turn(
    turns: int, calls: Mapping[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Samples of each call, which take turns, so that other work on the machine hits all; a first turn warms up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            sample = call()
            if turn:
                samples[name].append(sample)
    return samples


def timed(call: Callable[[], None]) -> float:
    """Seconds by the wall."""
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def run(*, quick: bool, device_name: str) -> Results:
    """Measure everything."""
    runs, sizes = (QUICK_RUNS, QUICK_SIZES) if quick else (RUNS, SIZES)
    pool_bytes = (max(sizes) * (4 if quick else 1) + 64 * MIB) * (1 if quick else 4)
    found: list[Measured] = []
    with two_processes(pool_bytes, 2, device_name) as bench:
        for scenario in scenarios(runs, max(sizes), pool_bytes):
            found += measure(bench, scenario, sizes, lambda size: turns_of(size, quick))
            print(scenario.name, flush=True)
        pages = pages_of(bench.target)
    device = f" --device {device_name}" if device_name != "cpu" else ""
    return Results(
        command=f"python -m bench.transfer{' --quick' * quick}{device}",
        what=WHAT,
        tables=[table(found)],
        charts=charts(found),
        targets=targets(found),
        notes=[
            "Blocks lie scattered on both sides, so that nothing is merged: a descriptor is one run.",
            "memcpy gathers runs from anywhere into one place; the others write them anywhere.",
            "A post within a host copies in the call, so several loads at once follow one another.",
            pages,
        ],
        quick=quick,
    )


def pages_of(memory: torch.Tensor) -> str:
    """A note on the pages that the memory has."""
    if memory.device.type != "cpu":
        return f"The memory is of {memory.device}; memcpy is index_select there."
    huge = huge_bytes_at(memory.data_ptr()) / len(memory)
    return f"THP_MEM_ALLOC_ENABLE=1 in all processes: {min(1.0, huge):.0%} of the consumer's memory is in huge pages."


def table(found: Sequence[Measured]) -> Table:
    """The grid."""
    columns = ["scenario", "request", "runs", "by NIXL", "turns"]
    columns += [
        *(f"{name}, GB/s" for name in (LOAD, LOADS, BARE, FENCED, MEMCPY)),
        "one / bare",
        "four / bare",
    ]
    rows: list[list[Cell]] = [
        [
            one.scenario.name,
            shown_bytes(one.request_bytes),
            one.runs,
            one.posted,
            len(one.seconds[LOAD]),
            *(
                statistics.median(one.rates(name))
                for name in (LOAD, LOADS, BARE, FENCED, MEMCPY)
            ),
            one.ratio(LOAD, BARE),
            one.ratio(LOADS, BARES),
        ]
        for one in found
    ]
    return Table("Medians of whole loads and what lies beneath", columns, rows)


def charts(found: Sequence[Measured]) -> list[Chart]:
    """By run length, and by request size."""
    equal = [one for one in found if one.scenario.producer == one.scenario.consumer]
    runs = list(dict.fromkeys(one.scenario.run_bytes for one in equal))
    largest = {
        run: [
            one
            for one in equal
            if one.scenario.run_bytes == run and one.request_bytes <= 64 * MIB
        ][-1:]
        for run in runs
    }
    return [
        Chart(
            "Throughput by run length, the largest request of at most 64 MiB",
            "bytes of a run",
            "GB/s",
            [
                Series.of_samples(
                    name,
                    [
                        (run, one.rates(name))
                        for run, of in largest.items()
                        for one in of
                    ],
                )
                for name in (LOAD, LOADS, BARE, FENCED, MEMCPY)
            ],
            x_log=True,
            y_log=True,
        ),
        Chart(
            "One load, of the bare NIXL loop with the same descriptors",
            "bytes of the request",
            "ratio",
            [
                Series(
                    f"{shown_bytes(run)} runs",
                    [
                        one.request_bytes
                        for one in equal
                        if one.scenario.run_bytes == run
                    ],
                    [
                        one.ratio(LOAD, BARE)
                        for one in equal
                        if one.scenario.run_bytes == run
                    ],
                )
                for run in runs
            ],
            x_log=True,
            limit=OF_BARE,
        ),
    ]


def targets(found: Sequence[Measured]) -> list[Target]:
    """By request size the worst scenario that reads in place, and memcpy for the longest runs."""
    direct = [one for one in found if not one.scenario.staged]
    made = []
    for size in sorted({one.request_bytes for one in direct}):
        for of, to, what in ((LOAD, BARE, "one load"), (LOADS, BARES, "four at once")):
            worst, ratio = min(
                (
                    (one, one.ratio(of, to))
                    for one in direct
                    if one.request_bytes == size
                ),
                key=lambda pair: pair[1],
            )
            note = f"worst: {worst.scenario.name}"
            if (
                ratio < OF_BARE
            ):  # the part of the miss that no connector with a fence can avoid
                note += f"; the bare loop with a fence and a message reaches {worst.ratio(FENCED, BARE):.2f}"
            made.append(
                Target.at_least(
                    f"{shown_bytes(size)}, {what}, of bare NIXL",
                    ratio,
                    OF_BARE,
                    "",
                    note,
                )
            )
    for one in [one for one in direct if one.scenario.run_bytes >= MIB][-1:]:
        name = f"{shown_bytes(one.request_bytes)} in {shown_bytes(one.scenario.run_bytes)} runs, of memcpy"
        note = f"bare NIXL: {one.ratio(BARE, MEMCPY):.2f}"
        made.append(Target.at_least(name, one.ratio(LOAD, MEMCPY), OF_MEMCPY, "", note))
    return made


def main() -> int:
    """Measure, print, write."""
    parser = command("transfer", __doc__, "three run lengths, three sizes")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where the caches are"
    )
    chosen = parser.parse_args()
    use_huge_pages()
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    # The bare loop's messages are not kvferry's, and the producer would warn of each.
    logging.getLogger("kvferry.worker.leases").setLevel(logging.ERROR)
    name = "transfer" if chosen.device == "cpu" else f"transfer-{chosen.device}"
    return measure_and_publish(
        name, lambda: run(quick=chosen.quick, device_name=chosen.device)
    )


if __name__ == "__main__":
    raise SystemExit(main())
