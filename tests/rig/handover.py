"""One handover between two rig engines; every byte of both is checked."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.settings import WorkerSettings
from tests.geometry.effects import number_names
from tests.geometry.pairs import Pair
from tests.rig.cache_engine import CacheEngine
from tests.rig.engine import SETTINGS, RigEngine
from tests.waiting import wait_until

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Moved:
    """Totals of a handover.

    Attributes:
        num_bytes, descriptors: over all consumer workers, as NIXL counted them.
        staged_bytes, waves: the part of them that went through the staging pools.
    """

    num_bytes: int
    descriptors: int
    staged_bytes: int
    waves: int


@contextlib.contextmanager
def rig_of(
    pair: Pair, settings: WorkerSettings = SETTINGS, make_producer: Callable[..., RigEngine] = RigEngine
) -> Iterator[tuple[RigEngine, RigEngine]]:
    """Producer and consumer of a pair, on NIXL; no thread of theirs is left behind."""
    number = next(_numbers)
    floats = pair.producer.cache_dtype != pair.consumer.cache_dtype
    with contextlib.ExitStack() as stack:
        producer = make_producer(f"P{number}", pair.model, pair.producer, NixlFabric, settings, 2 * number, floats)
        stack.callback(producer.close)
        consumer = RigEngine(f"C{number}", pair.model, pair.consumer, NixlFabric, settings, 2 * number + 1, floats)
        stack.callback(consumer.close)
        yield producer, consumer
    wait_until(lambda: not _transfer_threads(), "the transfer threads have ended")


def hand_over(pair: Pair, producer: RigEngine, consumer: RigEngine, request_id: str = "request") -> Moved:
    """Prefill the pair's request on the producer and load it on the consumer.

    Raises:
        AssertionError: the load is not good, a byte of either side is wrong, or a report is missing or repeated.
    """
    request, numbers = pair.request, number_names(consumer.description)
    params = producer.prefill(request_id, request, numbers)
    held, before = producer.snapshots(), consumer.snapshots()
    totals = len(consumer.totals)
    consumer.load(request_id, request, params)
    step_until(lambda: consumer.is_over(request_id), "the load is over", producer, consumer)
    assert request_id not in consumer.failed, f"the load has failed: {consumer.failed[request_id].value}"
    for index, (memory, snapshot) in enumerate(zip(consumer.memories, before, strict=True)):
        try:
            memory.check_loaded(snapshot, consumer.groups, request, numbers)
        except AssertionError as wrong:
            raise AssertionError(f"consumer worker {index}: {wrong}") from None
    step_until(lambda: producer.is_free(request_id), "all workers' blocks are free", producer, consumer)
    check_end(producer, consumer, request_id)
    for snapshot, now in zip(held, producer.snapshots(), strict=True):
        assert (snapshot.content == now.content).all(), "the producer's memory has changed"
    moved = consumer.totals[totals:]
    assert sum(x.planned_bytes for x in moved) == sum(x.transferred_bytes for x in moved)
    return Moved(
        num_bytes=sum(x.transferred_bytes for x in moved),
        descriptors=sum(x.descriptors for x in moved),
        staged_bytes=sum(x.staged_bytes for x in moved),
        waves=sum(x.waves for x in moved),
    )


def step_until(happened: Callable[[], bool], what: str, *engines: CacheEngine, timeout_s: float = 150.0) -> None:
    """Step the engines until it has happened."""
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        for engine in engines:
            engine.step()
        time.sleep(0.001)


def check_end(producer: CacheEngine, consumer: CacheEngine, request_id: str) -> None:
    """Check that each worker has reported once, that no message was wasted, and that no lease or load is left."""
    for engine in (producer, consumer):
        for _ in range(3):
            engine.step()
        assert not +engine.counts, f"{engine.name}: {+engine.counts}"
        engine.leases.check_integrity()
        engine.loads.check_integrity()
    assert producer.sent[request_id] == len(producer.workers)
    assert consumer.loaded[request_id] == len(consumer.workers)
    assert not len(producer.leases)


def _transfer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvferry-transfer"]
