"""The moves of two engines' workers for a request, in this process, with memmove in place of NIXL."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.planner import plan_engine
from kvferry.protocol.handshake import EngineDescription
from tests.connector.caches import storage_of
from tests.connector.recorded_engine import RecordedEngine
from tests.plan.samples import engine, worker


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
        workers=workers, topology=recorded.topology, groups=recorded.groups, engine_id=name
    )


def hand_over(
    source: RecordedEngine, target: RecordedEngine, num_tokens: int, seed: int = 1
) -> int:
    """A sequence is computed here and loaded there. Returns the bytes that moved."""
    theirs = source.place_sequence(num_tokens, range(1, 40))
    ours = target.place_sequence(num_tokens, range(39, 0, -1))
    source.write(theirs, seed)
    before = [storage_of(next(iter(one.views.values()))).clone() for one in target.workers]
    consumer, producer = described_engine(target, "C"), described_engine(source, "P")
    request = RequestBlocks(
        target.reported(ours),
        source.reported(theirs),
        first_token=0,
        stop_token=num_tokens,
        num_tokens=num_tokens,
    )
    total = move_by_plan(consumer, producer, request)
    target.check(ours, seed)
    for (one, loaded), old in zip(target.loaded_bytes(ours), before, strict=True):
        now = storage_of(next(iter(one.views.values())))
        assert torch.equal(now[~loaded], old[~loaded]), (
            f"{one.place}: bytes of other blocks have changed"
        )
    return total
