"""Transfer plans, kept by the producer's shape: engines of one fleet differ only in the addresses of their caches.

Merging, staging and the assignment of reads depend only on differences between addresses within a worker. So for two
producers whose tensors have the same differences, the plan of one is the plan of the other with every address moved.

    producer     layer 0     layer 1     plan
    P            0x1000      0x9000      made
    Q            0x5000      0xd000      that of P, 0x4000 further
    R            0x5000      0xe000      made: layer 1 is further away
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

import msgspec

from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.planner import plan_transfer
from kvferry.plan.runs import Bundle
from kvferry.plan.transfer_plan import Route, TransferPlan
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import EngineDescription, WorkerDescription

# Clients choose the producers, and so what is kept here: both numbers are limited.
MAX_PLANS = 16
"""Plans that are kept, those used last."""

MAX_TENSORS = 1 << 13
"""Of a producer's workers together; plans of larger producers are not kept, as they could take a gigabyte."""

ProducerShape = tuple[object, ...]
"""Everything that a plan depends on, with addresses as differences."""

_BASE = PagedTensor.__struct_fields__.index("base")


@dataclass(frozen=True, slots=True)
class _KeptPlan:
    """A plan, with each producer worker's first address: its first tensor's base."""

    plan: TransferPlan
    origins: tuple[int, ...]


class PlanCache:
    """The plans of one consumer worker. Any number of threads may use it.

    Args:
        consumer: the consumer's description, with all workers.
        worker: index of the worker that reads.
    """

    def __init__(
        self, consumer: EngineDescription, worker: int, costs: Costs = PUBLISHED
    ) -> None:
        self._consumer = consumer
        self._worker = worker
        self._costs = costs
        self._kept: OrderedDict[ProducerShape, _KeptPlan] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Plans that are kept."""
        return len(self._kept)

    def plan(
        self, producer: EngineDescription, mappable: frozenset[int] = frozenset()
    ) -> TransferPlan:
        """The plan of `plan_transfer` for this producer, of which these workers' memory may be mapped.

        Raises:
            PlanRefused: as `plan_transfer`.
            InvalidMessage: as `plan_transfer`.
        """
        tensors = sum(len(worker.tensors) for worker in producer.workers)
        if tensors > MAX_TENSORS:
            return self._make(producer, mappable)
        shape = (*_shape_of(producer), mappable)
        origins = tuple(_origin(worker) for worker in producer.workers)
        with self._lock:
            kept = self._kept.get(shape)
            if kept is not None:
                self._kept.move_to_end(shape)
        # The planner refuses addresses beyond 64 bits; moving a plan there must not go around that.
        has_legal_addresses = all(
            _end(worker) <= 1 << 63 for worker in producer.workers
        )
        if kept is not None and has_legal_addresses:
            return _moved_plan(kept, producer, origins)
        # Outside the lock: a plan may take seconds, and the other producers are not to wait.
        plan = self._make(producer, mappable)
        with self._lock:
            self._kept[shape] = _KeptPlan(plan, origins)
            if len(self._kept) > MAX_PLANS:
                self._kept.popitem(last=False)
        return plan

    def _make(
        self, producer: EngineDescription, mappable: frozenset[int]
    ) -> TransferPlan:
        return plan_transfer(
            self._consumer, self._worker, producer, self._costs, mappable
        )


def _shape_of(producer: EngineDescription) -> ProducerShape:
    facts = msgspec.structs.astuple(producer.facts)
    workers = tuple(
        (worker.place, _relative_tensors(worker)) for worker in producer.workers
    )
    return (facts, producer.topology, producer.groups, workers)


def _relative_tensors(worker: WorkerDescription) -> tuple[object, ...]:
    """The fields of a worker's tensors, with bases from its origin."""
    origin = _origin(worker)
    relative: list[tuple[object, ...]] = []
    for tensor in worker.tensors:
        fields = list(msgspec.structs.astuple(tensor))
        fields[_BASE] = tensor.base - origin
        relative.append(tuple(fields))
    return tuple(relative)


def _origin(worker: WorkerDescription) -> int:
    if not worker.tensors:
        return 0
    return worker.tensors[0].base


def _end(worker: WorkerDescription) -> int:
    """The largest address of a worker's tensors."""
    ends = [
        tensor.base + (tensor.blocks - 1) * tensor.block_stride + tensor.block_extent
        for tensor in worker.tensors
    ]
    return max(ends, default=0)


def _moved_plan(
    kept: _KeptPlan, producer: EngineDescription, origins: tuple[int, ...]
) -> TransferPlan:
    routes = tuple(
        _moved_route(
            route,
            producer.workers[route.worker],
            origins[route.worker] - kept.origins[route.worker],
        )
        for route in kept.plan.routes
    )
    return replace(kept.plan, producer=producer.engine_id, routes=routes)


def _moved_route(route: Route, producer: WorkerDescription, distance: int) -> Route:
    """The route with the producer's addresses moved by a number of bytes."""
    if not distance:
        return route
    tensors = {tensor.name: tensor for tensor in producer.tensors}
    # Of a bundle that is read in place, one side is the consumer's. Both sides of a source's bundle
    # are the producer's addresses; placements are relative to them.
    return replace(
        route,
        slices=tuple(
            replace(one_slice, remote=tensors[one_slice.remote.name])
            for one_slice in route.slices
        ),
        bundles=tuple(_moved_bundle(bundle, 0, distance) for bundle in route.bundles),
        sources=tuple(
            replace(source, bundle=_moved_bundle(source.bundle, distance, distance))
            for source in route.sources
        ),
    )


def _moved_bundle(bundle: Bundle, local_distance: int, remote_distance: int) -> Bundle:
    bases = tuple(
        (local + local_distance, remote + remote_distance)
        for local, remote in bundle.bases
    )
    return replace(bundle, bases=bases)
