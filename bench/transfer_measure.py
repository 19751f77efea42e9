"""One scenario of `bench.transfer`: a load and its rivals, in turn, over requests of several sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from bench.transfer_engine import Lease, ProducerAddress
from bench.transfer_loads import Loads
from bench.transfer_memory import Memory
from bench.transfer_rivals import BareNixl, kernel_reads, memory_copies, pieces_of
from bench.transfer_shapes import MIB, Scenario
from bench.transfer_split import medians, stages

AT_ONCE = 4
LOAD, LOADS, BARE, BARES, FENCED, READV, MEMCPY = "load", "loads", "bare", "bares", "fenced", "readv", "memcpy"
"""One load and four at once; the same of the bare loop; the bare loop with both reads of the fence and a message;
`process_vm_readv` and memcpy of one."""


@dataclass(frozen=True)
class Cell:
    """A request size of a scenario.

    Attributes:
        seconds: samples per candidate and request, in the order in which they were taken: the candidates took turns.
        result_s: of a load, until its result was there; `seconds` ends when the producer has been notified as well.
        runs: descriptors, before NIXL merges any.
        posted: descriptors as NIXL counted them.
    """

    request_bytes: int
    seconds: dict[str, list[float]]
    result_s: list[float]
    runs: int
    posted: int

    def gb_s(self, name: str) -> float | None:
        """Of the median; None where it was not measured."""
        samples = self.seconds.get(name)
        return self.request_bytes / statistics.median(samples) / 1e9 if samples else None

    def ratio(self, name: str, to: str) -> float | None:
        """How fast one candidate is, of another: the median over the turns, in each of which both were measured."""
        mine, others = self.seconds.get(name), self.seconds.get(to)
        if not mine or not others:
            return None
        return statistics.median(other / own for own, other in zip(mine, others, strict=True))


@dataclass(frozen=True)
class Measured:
    """A scenario."""

    scenario: Scenario
    cells: list[Cell]
    split: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The consumer's process: its end of the producer's channel, and its memory.

    Attributes:
        source: what memcpy copies from.
    """

    channel: Connection
    target: Memory
    source: Memory

    def ask(self, what: str, argument: Any) -> Any:
        """Have the producer do something."""
        self.channel.send((what, argument))
        return self.channel.recv()

    def leases(self, count: int) -> list[Lease]:
        found: list[Lease] = self.ask("lease", count)
        return found


def measure(
    bench: Bench, scenario: Scenario, sizes: Sequence[int], turns: Callable[[int], int], split: Sequence[int] = ()
) -> Measured:
    """All sizes that the scenario goes up to.

    Args:
        turns: how often each candidate has its turn, by the request's bytes.
        split: the sizes of which the stages are wanted too.
    """
    address: ProducerAddress = bench.ask("scenario", scenario)
    loads = Loads(scenario, bench.target, address)
    bare: BareNixl | None = None
    try:
        loads.load([loads.order(bench.leases(1)[0], MIB)])  # the first contact
        bare = BareNixl(scenario, bench.target, loads.peer)
        wanted = [size for size in sizes if size <= scenario.most_bytes]
        cells = [_cell(bench, loads, bare, address.pid, size, turns(size)) for size in wanted]
        found = {size: _split(bench, loads, size, turns(size)) for size in split if size in wanted}
        return Measured(scenario, cells, found)
    finally:
        loads.close()
        if bare is not None:
            bare.close()


def _cell(bench: Bench, loads: Loads, bare: BareNixl, pid: int, size: int, turns: int) -> Cell:
    scenario = loads.scenario
    device = bench.target.device.index or 0
    shares = [pieces_of(scenario, loads.peer, loads.order(_NO_LEASE, size, share), device) for share in range(AT_ONCE)]
    reads = [bare.reads(pieces) for pieces in shares]
    all_reads = [one for several in reads for one in several]
    rivals: dict[str, Callable[[], None]] = {
        BARE: lambda: bare.read(reads[0]),
        BARES: lambda: bare.read(all_reads),
        FENCED: lambda: bare.read_fenced(reads[0]),
        MEMCPY: memory_copies(scenario, bench.source, bench.target, shares[0]),
    }
    if bench.target.device.type == "cpu":
        rivals[READV] = kernel_reads(pid, shares[0], scenario.run_bytes)
    leases = bench.leases((turns + 1) * (1 + AT_ONCE))
    seconds: dict[str, list[float]] = {name: [] for name in (LOAD, LOADS, *rivals)}
    results, posted = [], 0
    for turn in range(turns + 1):
        one = loads.load([loads.order(leases.pop(), size)])
        several = loads.load([loads.order(leases.pop(), size, share) for share in range(AT_ONCE)])
        took = {LOAD: one.seconds, LOADS: several.seconds / AT_ONCE}
        took |= {name: _timed(rival) for name, rival in rivals.items()}
        took[BARES] /= AT_ONCE
        if turn:  # the first one warms up
            for name, value in took.items():
                seconds[name].append(value)
            results.append(one.result_s)
            posted = one.records[0].descriptors
    return Cell(size, seconds, results, sum(len(one.local) for one in shares[0]), posted)


def _split(bench: Bench, loads: Loads, size: int, turns: int) -> dict[str, float]:
    found = [
        stages(loads.load([loads.order(lease, size)], stamped=True).stamps, len(loads.peer.routes))
        for lease in bench.leases(turns)
    ]
    return medians(found)


def _timed(call: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


_NO_LEASE = Lease(0, "0" * 14 + "1", "none")
"""For orders that only say which blocks."""
