"""Hostile descriptions and hostile block ids: whatever a producer says of itself, the reads stay in their place.

What is accepted may read any of the *producer's* memory, which is its own affair. What it writes here must lie in the
cells of the request's own blocks.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.cost import Costs
from kvferry.plan.planner import plan_engine, plan_transfer
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.handshake import (
    EngineDescription,
    LeaseTableAddress,
    WorkerDescription,
)
from kvferry.worker.fabric.port import MemoryKind, OpenHandles, Region
from kvferry.worker.fabric.reads import FabricReader
from kvferry.worker.peer_memory.host_memory import FileMemory
from kvferry.worker.peers.mapped_route import Mapper
from kvferry.worker.peers.peer import PeerKey, connect, disconnect
from kvferry.worker.relayout.reference import ReferenceRelayout
from kvferry.worker.staging.buffer import Staging
from tests.fakes.memory_fabric import MemoryFabric, MemoryNetwork
from tests.fuzz.distortion import distorted
from tests.fuzz.mutation import INTEGERS, Source
from tests.geometry.cells import NULL_BLOCK, Ints, Memory, byte_addresses, cells_of
from tests.geometry.handmade import attention, hybrid, latent, pair, side
from tests.geometry.pairs import EngineShards, engine
from tests.geometry.pool import staged_waves
from tests.geometry.requests import Request
from tests.harness.caches import CacheShape, ToyCaches
from tests.plan.samples import engine as describe

MOST_S = 15.0
"""Of processor time, for any description of a few workers."""

POOL_BYTES = 1 << 16
MEMORY = FileMemory()
COSTS = tuple(Costs(staged_run_bytes=run_bytes) for run_bytes in (0, 128, 1 << 20))


@dataclass(frozen=True)
class Case:
    """Two engines with addresses, and a request between them.

    Attributes:
        own: per consumer worker, which bytes of its memory lie in cells of the request's blocks.
    """

    consumer: EngineShards
    producer: EngineShards
    request: Request
    own: tuple[npt.NDArray[np.bool_], ...]


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every kind of cache, other shards and blocks on both sides."""
    drawn = (
        pair(attention(), side(attention()), side(attention()), tokens=40),
        pair(
            attention(),
            side(attention(), tp=2, layout="NHD"),
            side(attention(), block=8, ratio=2),
            tokens=40,
        ),
        pair(
            attention(),
            side(attention(), layout="cross-layer", block=24),
            side(attention(), tp=2),
            tokens=50,
            stop=33,
        ),
        pair(
            latent(),
            side(latent(), tp=2, dcp=2, run=4),
            side(latent(), block=8),
            tokens=40,
        ),
        pair(hybrid(), side(hybrid(), tp=2), side(hybrid(), block=8), tokens=40),
        pair(
            attention(),
            side(attention(), layout="cpu"),
            side(attention(), layout="K and V apart"),
            tokens=33,
            first=16,
        ),
    )
    return tuple(
        _case(
            engine(one.model, one.consumer, "C"),
            engine(one.model, one.producer, "P"),
            one.request,
        )
        for one in drawn
    )


def _case(consumer: EngineShards, producer: EngineShards, request: Request) -> Case:
    groups = consumer.description.groups
    own = []
    for worker, memory in zip(
        consumer.description.workers, consumer.memories(), strict=True
    ):
        inside = np.zeros(memory.num_bytes, np.bool_)
        for tensor in worker.tensors:
            group = groups[tensor.group]
            ids = [
                block for block in request.local[tensor.group] if block != NULL_BLOCK
            ]
            cells = cells_of(tensor, group.policy, ids, 0, group.block_tokens)
            inside[memory.index(byte_addresses(tensor, cells))] = True
        own.append(inside)
    return Case(consumer, producer, request, tuple(own))


def planning(data: bytes) -> None:
    """A producer that says anything of itself, and a request with its blocks."""
    source = Source(data)
    case, costs = source.pick(cases()), source.pick(COSTS)
    hostile = distorted(source, case.producer.description)
    if hostile is None:
        return
    started_s = time.process_time()
    try:
        plans = plan_engine(case.consumer.description, hostile, costs)
    except KvferryError:
        return
    finally:
        assert time.process_time() - started_s < MOST_S, "planning took too long"
    request = case.request
    blocks = RequestBlocks(
        request.local,
        request.remote,
        request.first_token,
        request.stop_token,
        request.num_tokens,
    )
    check_writes(case, plans, hostile, blocks)


def pairing(data: bytes) -> None:
    """An honest producer, and block ids, counts and ranges of tokens that a client made up."""
    source = Source(data)
    case = source.pick(cases())
    plans = _honest_plans(cases().index(case))
    request = case.request
    remote = [list(group) for group in request.remote]
    for _ in range(source.number(6)):
        group = source.pick(remote)
        what = source.number(4)
        if what == 0 and group:
            group[source.number(len(group))] = source.pick(
                [x for x in INTEGERS if 0 <= x < 2**31]
            )
        elif what == 1:
            group.append(source.number(20))
        elif what == 2 and group:
            group.pop(source.number(len(group)))
        else:
            group[:] = group * source.number(4)
    num_tokens = source.pick(
        (
            request.num_tokens,
            request.num_tokens,
            *(x for x in INTEGERS if 1 <= x <= 2**40),
        )
    )
    stop = min(
        source.pick((request.stop_token, request.stop_token, 1, 17)), request.stop_token
    )
    first = min(source.pick((request.first_token, 0, 1, 16)), stop)
    reported = RequestBlocks(
        request.local, tuple(tuple(group) for group in remote), first, stop, num_tokens
    )
    check_writes(
        case,
        plans,
        case.producer.description,
        reported,
        reads_from=case.producer.memories(),
    )


@functools.cache
def _honest_plans(index: int) -> tuple[TransferPlan, ...]:
    case = cases()[index]
    return plan_engine(case.consumer.description, case.producer.description, COSTS[1])


def check_writes(
    case: Case,
    plans: tuple[TransferPlan, ...],
    producer: EngineDescription,
    request: RequestBlocks,
    reads_from: list[Memory] | None = None,
) -> None:
    """Nothing is written but cells of the request's own blocks; of an honest producer nothing else than caches is read.

    Raises:
        AssertionError, IndexError: something is.
    """
    groups = case.consumer.description.groups
    for plan, memory, own in zip(
        plans, case.consumer.memories(), case.own, strict=True
    ):
        try:
            units = pair_request(plan, groups, producer.groups, request)
        except KvferryError:
            continue
        for route in plan.routes:
            copies = [
                (one.src, one.dst, one.num_bytes) for one in route_copies(route, units)
            ]
            copies += [
                (one.src, one.dst, one.num_bytes)
                for wave in staged_waves(route, units)
                for one in wave.copies
            ]
            for src, dst, num_bytes in copies:
                written = memory.index(_ends(dst, num_bytes))
                assert own[written].all(), "a byte is written that is not the request's"
                assert int(num_bytes.sum()) <= 8 * int(own.sum()), (
                    "more is read than there is room for"
                )
                _check_between(memory, own, dst, num_bytes)
                if reads_from is not None:
                    reads_from[route.worker].index(_ends(src, num_bytes))


def _ends(starts: Ints, num_bytes: Ints) -> Ints:
    """The first and the last byte of every run."""
    return np.concatenate([starts, starts + num_bytes - 1])


def _check_between(
    memory: Memory, own: npt.NDArray[np.bool_], starts: Ints, num_bytes: Ints
) -> None:
    """All bytes of every run: as many of the request's own between its ends as it is long."""
    if not len(starts):
        return
    counted = np.concatenate(([0], np.cumsum(own)))
    first, last = memory.index(starts), memory.index(starts + num_bytes - 1)
    assert (last - first + 1 == num_bytes).all(), "a run leaves its allocation"
    assert (counted[last + 1] - counted[first] == num_bytes).all(), (
        "a run has bytes that are not the request's"
    )


class Ends:
    """A consumer with real caches, and a producer with real memory, on a network that checks every address."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.caches = ToyCaches(CacheShape(layers=2, blocks=8), poison=0)
        theirs = ToyCaches(CacheShape(layers=2, blocks=8, axes="bth"), poison=1)
        self.staging = Staging(self.caches.kv, POOL_BYTES)
        self.consumer = MemoryFabric("consumer", network)
        self.consumer.register([*self.caches.kv.regions(), self.staging.region()])
        self.reader = FabricReader(self.consumer)
        producer = MemoryFabric("producer", network)
        self._table = np.zeros(16, np.uint64)
        table = Region(
            int(self._table.ctypes.data), self._table.nbytes, MemoryKind.DRAM
        )
        producer.register([*theirs.kv.regions(), table])
        self._keeps_alive = theirs
        groups = (self.caches.shape.group,)
        self.description = describe(
            workers=[self._worker(theirs, producer.metadata(), table.address)],
            engine_id="P",
            groups=groups,
        )
        self.own = describe(
            workers=[self._worker(self.caches, b"own", 8)], engine_id="C", groups=groups
        )

    @staticmethod
    def _worker(caches: ToyCaches, metadata: bytes, table: int) -> WorkerDescription:
        (one,) = describe(*caches.kv.tensors).workers
        return msgspec.structs.replace(
            one,
            agent_metadata=metadata,
            lease_table=LeaseTableAddress(address=table, slots=16),
            tensors=caches.kv.tensors,
        )


NOTHING_OPEN = OpenHandles(transfers=0, prepared=0, peers=0, leaving=0)


@functools.cache
def ends() -> Ends:
    """Made once."""
    return Ends()


def connecting(data: bytes) -> None:
    """A producer that says anything of itself, seen by a worker: it is prepared, or refused and nothing is left."""
    source = Source(data)
    both = ends()
    staging = both.staging if source.number(2) else None
    hostile = distorted(source, both.description)
    if hostile is None:
        return
    key = PeerKey("10.0.0.1", 5600, "P", hostile.boot)
    costs = Costs(staged_run_bytes=staging.longest_run if staging is not None else 0)
    try:
        plan = plan_transfer(both.own, 0, hostile, costs)
        caches = both.caches.kv
        copies = partial(ReferenceRelayout, destinations=caches.storages)
        mapper = Mapper(MEMORY, copies)
        peer = connect(both.reader, caches, staging, key, hostile, plan, mapper)
    except KvferryError:
        pass
    else:
        for route in peer.routes:
            assert (
                route.slots.descriptors.count
                == hostile.workers[route.route.worker].lease_table.slots
            )
        disconnect(both.reader, peer)
    assert both.consumer.open_handles() == NOTHING_OPEN
