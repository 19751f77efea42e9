"""Loads over links on which a read takes a while after its post, and over both lanes for messages within a host.

Shared memory copies in the post, so the main grid of `bench.transfer` shows nothing of the transfer thread's backoff.
Here every load is measured twice, in turn: as it is, and with a backoff that only a load's end resets. Beside them,
in turn too, is a bare NIXL loop that polls without a backoff, where the link is one of NIXL's.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from unittest import mock

import torch

from bench.figures import Table
from bench.transfer_engine import ProducerAddress, serve
from bench.transfer_loads import Loads
from bench.transfer_measure import Bench
from bench.transfer_memory import Memory
from bench.transfer_rivals import BareNixl, pieces_of
from bench.transfer_shapes import MIB, Scenario, equal_shards, other_layout, shown_bytes
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import Fabric, Indices, LocalDescriptors, RemoteDescriptors, Transfer, TransferState
from kvferry.worker.loads import runner as load_runner
from kvferry.worker.staging import staged_reads

_WAVES = 8
_LATENCY_S = 20e-6
_COLUMNS = (
    "link",
    "request",
    "load, ms",
    "backoff reset at ends only, ms",
    "gain",
    "bare loop, fenced, ms",
    "CPU, ms a load",
)


class PacedFabric(NixlFabric):
    """NIXL as over a link of `gb_s`, in GB/s: a read is in flight for as long as that takes, after 20 µs of latency.

    Within a host the bytes are copied in the post; that time is part of what the link takes.
    """

    gb_s = 4.0

    def __init__(self, agent_name: str) -> None:
        super().__init__(agent_name)
        self._begun_s: dict[Transfer, float] = {}

    def post_read(
        self, local: LocalDescriptors, local_indices: Indices, remote: RemoteDescriptors, remote_indices: Indices
    ) -> Transfer:
        begun_s = time.monotonic()
        transfer = super().post_read(local, local_indices, remote, remote_indices)
        self._begun_s[transfer] = begun_s
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        state = super().poll(transfer)
        if state is TransferState.IN_FLIGHT or transfer not in self._begun_s:
            return state
        reported = self.telemetry(transfer)
        takes_s = _LATENCY_S + (reported.bytes / self.gb_s / 1e9 if reported is not None else 0.0)
        if time.monotonic() < self._begun_s[transfer] + takes_s:
            return TransferState.IN_FLIGHT
        del self._begun_s[transfer]
        return state


@dataclass(frozen=True)
class Link:
    """How two engines reach each other.

    Attributes:
        environ: UCX's settings on both sides.
        is_paced: the reads of a `PacedFabric`.
    """

    name: str
    environ: Mapping[str, str] = field(default_factory=dict)
    is_paced: bool = False

    def make_fabric(self, agent_name: str) -> Fabric:
        return PacedFabric(agent_name) if self.is_paced else NixlFabric(agent_name)


LANES = (
    Link("one host, messages through shared memory", {"UCX_MM_ERROR_HANDLING": "y"}),
    Link("one host, messages over loopback TCP", {"UCX_MM_ERROR_HANDLING": "n"}),
)
TCP = Link("TCP", {"UCX_TLS": "tcp"})
PACED = Link(f"{PacedFabric.gb_s:g} GB/s", is_paced=True)


def links(pool_bytes: int, *, turns: int) -> Table:
    """A table of all links. The processes and the memory are its own, of `pool_bytes` on either side."""
    direct = equal_shards(16 << 10, 64 * MIB, pool_bytes, huge=True)
    staged = other_layout(256, 64 * MIB, pool_bytes, staged=True, huge=True)
    # A wave of 2.5 MiB takes 0.64 ms at 4 GB/s.
    cases = [
        (TCP, direct, 256 << 10),
        (TCP, direct, 4 * MIB),
        (PACED, direct, 256 << 10),
        (PACED, direct, 16 * MIB),
        (PACED, staged, _WAVES * 5 * MIB // 2),
    ]
    rows = []
    target = Memory(pool_bytes, huge=True, device=torch.device("cpu"))
    for link, scenario, size in cases:
        with _consumer(link, scenario, target) as (bench, loads):
            rows.append(_row(link, bench, loads, size, turns))
    return Table("Reads that take a while after their post", _COLUMNS, rows)


def lanes(pool_bytes: int, *, turns: int) -> Table:
    """Loads with either lane for messages between processes of a host, in turn."""
    scenario = equal_shards(16 << 10, 4 * MIB, pool_bytes, huge=True)
    targets = [Memory(pool_bytes, huge=True, device=torch.device("cpu")) for _ in LANES]
    with (
        _consumer(LANES[0], scenario, targets[0]) as shared,
        _consumer(LANES[1], scenario, targets[1]) as tcp,
    ):
        rows = []
        for size in (256 << 10, MIB, 4 * MIB):
            took: list[list[float]] = [[], []]
            for turn in range(turns):
                for number in (0, 1) if turn % 2 else (1, 0):
                    bench, loads = (shared, tcp)[number]
                    took[number].append(loads.load([loads.order(bench.leases(1)[0], size)]).seconds)
            costs = [after - before for before, after in zip(*took, strict=True)]
            first, second = (statistics.median(one) * 1e3 for one in took)
            rows.append((shown_bytes(size), first, second, statistics.median(costs) * 1e3, second / first))
        idle = [bench.ask("idle_cpu", 2.0) for bench, _ in (shared, tcp)]
    rows.append(("an idle producer, cores", *idle, idle[1] - idle[0], None))
    columns = ("request", "shared memory, ms", "loopback TCP, ms", "more, ms", "of shared memory")
    return Table("One load, by the lane for messages within a host", columns, rows)


def _row(link: Link, bench: Bench, loads: Loads, size: int, turns: int) -> tuple[str | float | None, ...]:
    scenario = loads.scenario
    bare = None if link.is_paced else BareNixl(scenario, bench.target, loads.peer)
    lease = bench.leases(1)[0]
    reads = bare.reads(pieces_of(scenario, loads.peer, loads.order(lease, size), 0)) if bare is not None else []
    with_stages, ends_only, alone = list[float](), list[float](), list[float]()
    cpu_s, wave_bytes = 0.0, size // _WAVES if scenario.staged else staged_reads.MAX_WAVE_BYTES
    with mock.patch.object(staged_reads, "MAX_WAVE_BYTES", wave_bytes):
        for turn in range(turns):
            for stages_count in (True, False) if turn % 2 else (False, True):  # the first one finds the producer asleep
                before_s, order = loads.cpu_s(), loads.order(bench.leases(1)[0], size)
                with nullcontext() if stages_count else mock.patch.object(load_runner, "_place", return_value=None):
                    (with_stages if stages_count else ends_only).append(loads.load([order]).seconds)
                cpu_s += loads.cpu_s() - before_s if stages_count else 0.0
            if bare is not None:
                begun_s = time.perf_counter()
                bare.read_fenced(reads)
                alone.append(time.perf_counter() - begun_s)
    if bare is not None:
        bare.close()
    gain = statistics.median(slow / fast for slow, fast in zip(ends_only, with_stages, strict=True))
    shown = f"{shown_bytes(size)}, {f'{_WAVES} waves' if scenario.staged else 'in place'}"
    own, other = statistics.median(with_stages) * 1e3, statistics.median(ends_only) * 1e3
    least = statistics.median(alone) * 1e3 if alone else None
    return (link.name, shown, own, other, gain, least, cpu_s / turns * 1e3)


@contextmanager
def _consumer(link: Link, scenario: Scenario, target: Memory) -> Iterator[tuple[Bench, Loads]]:
    """A producer's process and a connected consumer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with mock.patch.dict(os.environ, link.environ):
        producer = context.Process(target=serve, args=(theirs, scenario.pool_bytes, 1, "cpu"), name="producer")
        producer.start()
        theirs.close()
        try:
            with _loads(link, scenario, ours, target) as found:
                yield found
        finally:
            ours.close()
            producer.join(30.0)
            if producer.is_alive():
                producer.kill()


@contextmanager
def _loads(link: Link, scenario: Scenario, channel: Connection, target: Memory) -> Iterator[tuple[Bench, Loads]]:
    bench = Bench(channel, target=target, source=target)
    address: ProducerAddress = bench.ask("scenario", scenario)
    loads = Loads(scenario, target, address, link.make_fabric)
    try:
        loads.load([loads.order(bench.leases(1)[0], MIB)])  # the first contact
        yield bench, loads
    finally:
        loads.close()
