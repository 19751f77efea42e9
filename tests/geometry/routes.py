"""Checks of the routes of a plan, for any bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.handshake import EngineDescription


def check_routes(plans: Sequence[TransferPlan], producer: EngineDescription) -> None:
    """Every producer worker is notified by `expected` workers, and replicas serve equally many readers.

    Raises:
        AssertionError: naming the producer worker.
    """
    tellers: Counter[int] = Counter()
    for plan in plans:
        named = [route.worker for route in plan.routes]
        assert len(set(named)) == len(named), f"worker {plan.worker} has two routes to one producer worker"
        tellers.update(named)
    read = {route.worker for plan in plans for route in plan.routes if route.slices}
    for worker in range(len(producer.workers)):
        assert tellers[worker], f"no worker notifies producer worker {worker}"
        assert worker in read or tellers[worker] == 1, f"{tellers[worker]} release producer worker {worker}"
    for plan in plans:
        for route in plan.routes:
            assert route.expected == tellers[route.worker], f"producer worker {route.worker} expects {route.expected}"
            assert route.place == producer.workers[route.worker].place
            assert route.slices or route.worker not in read, f"producer worker {route.worker} is released and read"
    _check_balance(plans, producer)


def _check_balance(plans: Sequence[TransferPlan], producer: EngineDescription) -> None:
    """Of the workers that hold the same tokens of a head, each serves as many readers of it as any other, or one more.

    Raises:
        AssertionError: naming the tensor and the head.
    """
    readers: Counter[tuple[tuple[str, str], int, int]] = Counter()
    for plan in plans:
        for route in plan.routes:
            for item in route.slices:
                readers.update(
                    (item.local.name, head, route.worker) for head in range(item.heads.start, item.heads.stop)
                )
    replicas: dict[object, list[int]] = {}
    for worker, description in enumerate(producer.workers):
        for tensor in description.tensors:
            for head in range(tensor.heads.start, tensor.heads.stop):
                times = readers[tensor.name, head, worker]
                replicas.setdefault((tensor.name, head, tensor.interleave.rank), []).append(times)
    for key, served in replicas.items():
        assert max(served) - min(served) <= 1, f"replicas of {key} serve {served} readers"
