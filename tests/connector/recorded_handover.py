"""A handover between two engines of a recorded model: by NIXL, or by its plan, with memmove in place of NIXL."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.planner import plan_engine
from kvferry.protocol.handshake import EngineDescription
from kvferry.worker.fabric.nixl import NixlFabric
from tests.connector.caches import storage_of
from tests.connector.recorded_engine import RecordedEngine
from tests.geometry.requests import Request
from tests.harness import handover
from tests.harness.cache_engine import SETTINGS, CacheEngine
from tests.plan.samples import engine, worker

_numbers = itertools.count(1)


def hand_over(
    source: RecordedEngine,
    target: RecordedEngine,
    num_tokens: int,
    seed: int = 1,
    *,
    staging_pool_bytes: int | None = None,
) -> int:
    """A sequence is computed here and loaded there.

    Args:
        staging_pool_bytes: of engines that hand over by NIXL; None to carry out their plan in this process.

    Returns:
        The bytes that have moved.

    Raises:
        AssertionError: the load is not good, the consumer's layers read something else, or a byte beside the request's
            blocks has changed.
    """
    theirs = source.place_sequence(num_tokens, range(1, 40))
    ours = target.place_sequence(num_tokens, range(39, 0, -1))
    request = Request(
        target.reported(ours), source.reported(theirs), 0, num_tokens, num_tokens
    )
    before = _contents(target)

    def compute() -> None:
        source.write(theirs, seed)

    def check() -> None:
        target.check(ours, seed)

    if staging_pool_bytes is None:
        compute()
        consumer, producer = (
            described_engine(target, "C"),
            described_engine(source, "P"),
        )
        moved = move_by_plan(consumer, producer, request.blocks)
        check()
    else:
        moved = _by_nixl(source, target, request, compute, check, staging_pool_bytes)
    for (one, loaded), old, now in zip(
        target.loaded_bytes(ours), before, _contents(target), strict=True
    ):
        assert torch.equal(now[~loaded], old[~loaded]), (
            f"{one.place}: bytes of other blocks have changed"
        )
    return moved


def move_by_plan(
    consumer: EngineDescription, producer: EngineDescription, request: RequestBlocks
) -> int:
    """Carry out every worker's plan. Returns the bytes that moved."""
    total = 0
    for plan in plan_engine(consumer, producer):
        units = pair_request(plan, consumer.groups, producer.groups, request)
        for route in plan.routes:
            for copies in route_copies(route, units):
                for src, dst, num_bytes in zip(
                    copies.src, copies.dst, copies.num_bytes, strict=True
                ):
                    ctypes.memmove(int(dst), int(src), int(num_bytes))
                total += int(copies.num_bytes.sum())
    return total


def described_engine(recorded: RecordedEngine, name: str) -> Any:
    workers = [worker(one.caches.tensors, one.place) for one in recorded.workers]
    return engine(
        workers=workers,
        topology=recorded.topology,
        groups=recorded.groups,
        engine_id=name,
    )


def _by_nixl(
    source: RecordedEngine,
    target: RecordedEngine,
    request: Request,
    compute: Callable[[], None],
    check: Callable[[], None],
    staging_pool_bytes: int,
) -> int:
    settings = replace(SETTINGS, staging_pool_bytes=staging_pool_bytes)
    with contextlib.ExitStack() as stack:
        engines = []
        for letter, recorded in (("P", source), ("C", target)):
            shards = [(one.place, one.caches) for one in recorded.workers]
            name = f"{letter}recorded{next(_numbers)}"
            made = CacheEngine(
                name,
                NixlFabric,
                shards,
                recorded.groups,
                recorded.topology,
                settings=settings,
            )
            stack.callback(made.close)
            stack.callback(made.wait_until_idle)
            engines.append(made)
        producer, consumer = engines
        records = handover.hand_over(producer, consumer, request, compute, check)
        return sum(record.transferred_bytes for record in records)


def _contents(engine: RecordedEngine) -> list[torch.Tensor]:
    return [
        storage_of(next(iter(one.views.values()))).clone() for one in engine.workers
    ]
