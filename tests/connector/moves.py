"""The moves of two engines' workers for a request, in this process, with memmove in place of NIXL."""

from __future__ import annotations

import ctypes

from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.planner import plan_engine
from kvferry.protocol.handshake import EngineDescription


def move_by_plan(consumer: EngineDescription, producer: EngineDescription, request: RequestBlocks) -> int:
    """Carry out every worker's plan. Returns the bytes that moved."""
    total = 0
    for plan in plan_engine(consumer, producer):
        units = pair_request(plan, consumer.groups, producer.groups, request)
        for route in plan.routes:
            for copies in route_copies(route, units):
                for src, dst, num_bytes in zip(copies.src, copies.dst, copies.num_bytes, strict=True):
                    ctypes.memmove(int(dst), int(src), int(num_bytes))
                total += int(copies.num_bytes.sum())
    return total
