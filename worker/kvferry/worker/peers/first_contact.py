"""The first contact with a producer, without the fabric: its description is fetched, and the transfer planned.

Plans are kept by the producer's shape: engines of one fleet differ only in the addresses of their caches.
Merging, staging and the assignment of reads depend only on differences between addresses within a worker. So for two
producers whose tensors have the same differences, the plan of one is the plan of the other with every address moved.

    producer     layer 0     layer 1     plan
    P            0x1000      0x9000      made
    Q            0x5000      0xd000      that of P, 0x4000 further
    R            0x5000      0xe000      made: layer 1 is further away
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.planner import plan_transfer
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.runs import Bundle
from kvferry.plan.transfer_plan import Route, TransferPlan
from kvferry.protocol.errors import InvalidMessage, PeerRefused
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import EngineDescription, WorkerDescription
from kvferry.protocol.side_channel.client import SideChannelClient
from kvferry.protocol.side_channel.hosts import host_port
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.peers.peer import PeerKey
from kvferry.worker.settings import WorkerSettings

MOST_SHAPES = 16
"""Most plans that are kept, those used last; a limit is needed because clients choose the producers."""
MOST_TENSORS = 1 << 13
"""Of a producer's workers together; plans of larger producers are not kept, as they could take a gigabyte."""

Shape = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan, with each producer worker's first address: its first tensor's base."""

    plan: TransferPlan
    origins: tuple[int, ...]


class PlanCache:
    """The plans of one consumer worker. Any number of threads may use it.

    Args:
        consumer: the consumer's description, with all workers.
        worker: index of the worker that reads.
    """

    def __init__(self, consumer: EngineDescription, worker: int, costs: Costs = PUBLISHED) -> None:
        self._consumer = consumer
        self._worker = worker
        self._costs = costs
        self._made: OrderedDict[Shape, _Made] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, producer: EngineDescription) -> TransferPlan:
        """The plan of `plan_transfer` for this producer; raises as it does."""
        if sum(len(worker.tensors) for worker in producer.workers) > MOST_TENSORS:
            return plan_transfer(self._consumer, self._worker, producer, self._costs)
        shape, origins = _shape_of(producer), tuple(map(_origin, producer.workers))
        with self._lock:
            made = self._made.get(shape)
            if made is not None:
                self._made.move_to_end(shape)
        if made is not None and all(_end(worker) <= 1 << 63 for worker in producer.workers):
            return _moved(made, producer, origins)
        plan = plan_transfer(self._consumer, self._worker, producer, self._costs)
        with self._lock:
            self._made[shape] = _Made(plan, origins)
            if len(self._made) > MOST_SHAPES:
                self._made.popitem(last=False)
        return plan


def _shape_of(producer: EngineDescription) -> Shape:
    """Everything that a plan depends on, with addresses as differences."""
    facts = msgspec.structs.astuple(producer.facts)
    workers = tuple((worker.place, _tensors(worker)) for worker in producer.workers)
    return (facts, producer.topology, producer.groups, workers)


_BASE = PagedTensor.__struct_fields__.index("base")


def _tensors(worker: WorkerDescription) -> tuple[object, ...]:
    origin = _origin(worker)
    fields = map(msgspec.structs.astuple, worker.tensors)
    return tuple((*of[:_BASE], of[_BASE] - origin, *of[_BASE + 1 :]) for of in fields)


def _origin(worker: WorkerDescription) -> int:
    return worker.tensors[0].base if worker.tensors else 0


def _end(worker: WorkerDescription) -> int:
    ends = (x.base + (x.blocks - 1) * x.block_stride + x.block_extent for x in worker.tensors)
    return max(ends, default=0)


def _moved(made: _Made, producer: EngineDescription, origins: tuple[int, ...]) -> TransferPlan:
    routes = tuple(
        _moved_route(
            route,
            producer.workers[route.worker],
            origins[route.worker] - made.origins[route.worker],
        )
        for route in made.plan.routes
    )
    return replace(made.plan, producer=producer.engine_id, routes=routes)


def _moved_route(route: Route, there: WorkerDescription, by: int) -> Route:
    if not by:
        return route
    remote = {tensor.name: tensor for tensor in there.tensors}
    return replace(
        route,
        slices=tuple(replace(one, remote=remote[one.remote.name]) for one in route.slices),
        bundles=tuple(_moved_bundle(one, 0, by) for one in route.bundles),
        # Both sides of a source's bundle are the producer's addresses; placements are relative to them.
        sources=tuple(
            replace(one, bundle=_moved_bundle(one.bundle, by, by)) for one in route.sources
        ),
    )


def _moved_bundle(one: Bundle, local_by: int, remote_by: int) -> Bundle:
    return replace(
        one, bases=tuple((local + local_by, remote + remote_by) for local, remote in one.bases)
    )


_PLANS_AT_ONCE = 4
"""Plans made at a time: planning holds the interpreter's lock, and any peer can describe engines that take seconds."""

_MOST_REHEARSED = 64
"""Most workers of an engine that plans a transfer from itself at its start; with more it takes seconds."""


class FirstContact:
    """First contacts of one worker. Any number of threads may use it.

    Args:
        engine: this engine, with this worker alone until `set_workers`.
    """

    def __init__(self, engine: EngineDescription, costs: Costs, settings: WorkerSettings) -> None:
        self._engine = engine
        self._costs = costs
        self._settings = settings
        self._planning = threading.Semaphore(_PLANS_AT_ONCE)
        self._side_channel = SideChannelClient(settings.secrets, settings.allowed_hosts)
        self._plans = PlanCache(engine, 0, costs)

    def set_workers(
        self,
        consumers: Sequence[WorkerDescription],
        index: int,
        producers: Sequence[WorkerDescription],
    ) -> None:
        """Set the workers of this engine, and prepare the first contact: plan one with a producer of its own shape.

        Where that fails the engine starts all the same: the first contact does it, or reports the reason.

        Args:
            consumers: described as consumers; the worker at `index` plans its own reads.
            producers: the same workers described as producers.
        """
        self._engine = msgspec.structs.replace(self._engine, workers=tuple(consumers))
        self._plans = PlanCache(self._engine, index, self._costs)
        try:
            if len(producers) <= _MOST_REHEARSED:
                with contextlib.suppress(PlanRefused, InvalidMessage):
                    self._plans.plan(
                        msgspec.structs.replace(self._engine, workers=tuple(producers))
                    )
        except Exception:  # noqa: BLE001 - shown, with its traceback
            internal_errors.log("a first contact could not be prepared; the engine starts without")

    def handshake(self, key: PeerKey) -> tuple[EngineDescription, TransferPlan]:
        """Fetch a producer's description and plan the transfer; waits, so it runs on a thread of its own.

        Raises:
            HandshakeFailed, InvalidMessage: as `SideChannelClient.fetch_description`.
            PeerRefused: likewise, or another engine or boot has answered.
            PlanRefused: this worker cannot read from it.
        """
        own, timeout_s = self._engine.engine_id, self._settings.handshake_timeout_s
        # The params are of a listener that was there: a closed port is the end of that boot. Clients choose ports, too.
        description = self._side_channel.fetch_description(
            key.host, key.port, key.engine_id, own, timeout_s, queries_prompts=True, waits=False
        )
        if description.engine_id != key.engine_id:
            where = host_port(key.host, key.port)
            raise PeerRefused(f"{where} is engine {description.engine_id}, not {key.engine_id}")
        if description.boot != key.boot:
            raise PeerRefused(f"engine {key.engine_id} has restarted since it wrote these params")
        with self._planning:
            return description, self._plans.plan(description)

    def close(self) -> None:
        """End the side channel's connections. Idempotent."""
        self._side_channel.close()
