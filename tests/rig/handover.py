"""One handover between two rig engines; every byte of both is checked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.settings import WorkerSettings
from kvferry.worker.worker import MakeFabric
from tests.geometry.effects import number_names
from tests.geometry.pairs import Pair
from tests.harness import handover
from tests.harness.rig import until_threads_end
from tests.rig.engine import SETTINGS, RigEngine

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Moved:
    """Totals of a handover.

    Attributes:
        num_bytes, descriptors: over all consumer workers, as NIXL counted them.
        staged_bytes, waves: the part of them that went through the staging pools.
        mapped_bytes: those that were copied from mapped memory, which NIXL does not count.
    """

    num_bytes: int
    descriptors: int
    staged_bytes: int
    waves: int
    mapped_bytes: int


@contextlib.contextmanager
def rig_of(
    pair: Pair,
    settings: WorkerSettings = SETTINGS,
    make_producer: Callable[..., RigEngine] = RigEngine,
    make_fabric: MakeFabric = NixlFabric,
) -> Iterator[tuple[RigEngine, RigEngine]]:
    """Producer and consumer of a pair; no thread of theirs is left behind."""
    number = next(_numbers)
    floats = pair.producer.cache_dtype != pair.consumer.cache_dtype
    with contextlib.ExitStack() as stack:
        engines = [
            make(
                f"{letter}{number}",
                pair.model,
                side,
                make_fabric,
                settings,
                seed=2 * number + index,
                floats=floats,
            )
            for index, (letter, make, side) in enumerate(
                (("P", make_producer, pair.producer), ("C", RigEngine, pair.consumer))
            )
        ]
        for engine in engines:
            stack.callback(engine.close)
            stack.callback(engine.wait_until_idle)
        yield engines[0], engines[1]
    until_threads_end()


def hand_over(
    pair: Pair,
    producer: RigEngine,
    consumer: RigEngine,
    request_id: str = "request",
    lease: handover.Lease = handover.lease,
) -> Moved:
    """Prefill the pair's request on the producer and load it on the consumer.

    Args:
        lease: how the producer holds it.

    Raises:
        AssertionError: the load is not good, a byte of either side is wrong, or a report is missing or repeated.
    """
    request, numbers, before = (
        pair.request,
        number_names(consumer.description),
        consumer.snapshots(),
    )

    def check() -> None:
        for index, (memory, snapshot) in enumerate(
            zip(consumer.memories, before, strict=True)
        ):
            try:
                memory.check_loaded(
                    snapshot, consumer.description.groups, request, numbers
                )
            except AssertionError as wrong:
                raise AssertionError(f"consumer worker {index}: {wrong}") from None

    moved = handover.hand_over(
        producer,
        consumer,
        request,
        lambda: producer.compute(request, numbers),
        check,
        request_id,
        lease,
    )
    return Moved(
        num_bytes=sum(x.transferred_bytes for x in moved),
        descriptors=sum(x.descriptors for x in moved),
        staged_bytes=sum(x.staged_bytes for x in moved),
        waves=sum(x.waves for x in moved),
        mapped_bytes=sum(x.mapped_bytes for x in moved),
    )
