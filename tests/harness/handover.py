"""One prompt handed over between two engines without a model; every byte of the producer stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.producer.block_references import Reservation
from kvferry.worker.loads.results import LoadRecord
from tests.geometry.requests import Request
from tests.harness.cache_engine import CacheEngine
from tests.harness.ledgers import check_ledgers
from tests.waiting import step_until

TIMEOUT_S = 150.0

Lease = Callable[[CacheEngine, str, Request, Callable[[], object]], RemotePrefill]
"""Computes a prompt and holds its blocks under a lease of this name; returns the signed params."""


def lease(
    engine: CacheEngine,
    request_id: str,
    request: Request,
    compute: Callable[[], object],
) -> RemotePrefill:
    """Compute a prompt under a lease, and hold its blocks. Returns the signed params."""
    assert engine.leases.open(request_id)
    engine.step()
    compute()
    params = engine.finish(request_id, request.remote, request.num_tokens)
    assert params is not None
    engine.step()
    return params


def lease_prefix(
    engine: CacheEngine,
    name: str,
    request: Request,
    compute: Callable[[], object],
) -> RemotePrefill:
    """Hold blocks that are in the cache as another engine finds them there. Returns the signed params.

    The step that opens the lease writes them, as one that has just been scheduled may.
    """
    reservation = Reservation()
    blocks = {block for ids in request.remote for block in ids if block}
    engine.leases.block_references.reserve(reservation, sorted(blocks))
    worker_blocks = request.remote if engine.copies_blocks else ()
    held = engine.leases.hold_prefix(
        name, worker_blocks, reservation, is_computed=False
    )
    engine.launched.append(lambda: _do(compute))
    engine.step()
    return engine.signed(held, request.remote, request.num_tokens)


def load(
    engine: CacheEngine, request_id: str, request: Request, params: RemotePrefill
) -> None:
    """Order the load on all workers."""
    engine.order_load(
        request_id,
        params,
        request.first_token,
        request.stop_token,
        lambda _: request.local,
    )
    engine.step()


def hand_over(
    producer: CacheEngine,
    consumer: CacheEngine,
    request: Request,
    compute: Callable[[], object],
    check: Callable[[], object],
    request_id: str = "request",
    lease: Lease = lease,
) -> list[LoadRecord]:
    """Compute a request on the producer and load it on the consumer.

    Args:
        check: of the consumer's caches, when the load is good.
        lease: how the producer holds it.

    Returns:
        The records of the load on the consumer's workers.

    Raises:
        AssertionError: the load is not good, a byte is wrong, or a report is missing, repeated or left over.
    """
    params = lease(producer, request_id, request, compute)
    held, totals = contents(producer), len(consumer.seen.totals)
    load(consumer, request_id, request, params)
    engines = (producer, consumer)
    step_until(
        lambda: consumer.seen.is_over(request_id),
        "the load is over",
        *engines,
        timeout_s=TIMEOUT_S,
    )
    failed = consumer.seen.failed.get(request_id)
    assert failed is None, f"the load has failed: {failed.value}"
    check()
    step_until(
        lambda: request_id in producer.seen.sent,
        "the blocks are free",
        *engines,
        timeout_s=TIMEOUT_S,
    )
    for engine in engines:
        for _ in range(3):
            engine.step()
        assert not +engine.seen.counts, f"{engine.name}: {+engine.seen.counts}"
        check_ledgers(engine.leases, engine.loads)
    assert not len(producer.leases)
    assert all(map(torch.equal, held, contents(producer))), (
        "the producer's memory has changed"
    )
    moved = consumer.seen.totals[totals:]
    assert sum(one.planned_bytes for one in moved) == sum(
        one.transferred_bytes + one.mapped_bytes for one in moved
    )
    return moved


def _do(compute: Callable[[], object]) -> None:
    compute()


def contents(engine: CacheEngine) -> list[torch.Tensor]:
    """A copy of every allocation of an engine's caches, worker by worker."""
    return [
        storage.clone() for _, caches in engine.shards for storage in caches.storages
    ]
