"""Whether two engines can be paired at all, by brute force from the definitions.

They can when every cell that a consumer worker holds is a cell of some producer worker (same layer and kind, same
format, same head, same tokens), and the producer has no layers besides. A cell of several tokens is one thing: it is
neither divided nor put together. (Formats that can be converted into one another are not drawn, and so unequal formats
are an obstacle here.)
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from kvferry.protocol.geometry import Interleave, PagedTensor
from kvferry.protocol.handshake import EngineDescription
from tests.geometry.cells import token_of

_COMPARED_FACTS = ("fingerprint", "dtype", "quantization", "speculative", "settings")
"""Not the cache's dtype as it was configured: every tensor tells its own."""


def feasible(consumer: EngineDescription, producer: EngineDescription) -> bool:
    """Whether every worker of `consumer` can get everything that it holds from `producer`."""
    if any(
        getattr(consumer.facts, name) != getattr(producer.facts, name)
        for name in _COMPARED_FACTS
    ):
        return False
    ours, theirs = (
        [(group.policy, group.window_tokens) for group in x.groups]
        for x in (consumer, producer)
    )
    if ours != theirs:
        return False
    if not _layers(producer) <= _layers(consumer):
        return False
    holders: dict[tuple[str, str], list[PagedTensor]] = {}
    for worker in producer.workers:
        for tensor in worker.tensors:
            holders.setdefault(tensor.name, []).append(tensor)
    return all(
        _found(
            tensor, head, holders.get(tensor.name, []), ours[tensor.group][0] == "state"
        )
        for worker in consumer.workers
        for tensor in worker.tensors
        for head in range(tensor.heads.start, tensor.heads.stop)
    )


def _layers(engine: EngineDescription) -> set[str]:
    return {tensor.layer for worker in engine.workers for tensor in worker.tensors}


def _found(
    tensor: PagedTensor, head: int, holders: list[PagedTensor], is_state: bool
) -> bool:
    """Whether all cells of one head are among the holders'."""
    alike = [
        other
        for other in holders
        if other.heads.start <= head < other.heads.stop
        and (other.group, other.format, other.cell_bytes)
        == (tensor.group, tensor.format, tensor.cell_bytes)
    ]
    if is_state or not alike:
        return bool(alike)
    if any(
        other.interleave == tensor.interleave
        and other.tile_tokens == tensor.tile_tokens
        for other in alike
    ):
        return True
    everything = [tensor, *alike]
    # Everything repeats after this many tokens.
    period = math.lcm(
        *(
            one.interleave.ranks * one.interleave.run_tokens * one.tile_tokens
            for one in everything
        )
    )
    wanted = _cells(tensor.interleave, tensor.tile_tokens, period)
    return wanted <= frozenset().union(
        *(_cells(one.interleave, one.tile_tokens, period) for one in alike)
    )


@lru_cache(maxsize=4096)
def _cells(
    interleave: Interleave, tile_tokens: int, period: int
) -> frozenset[tuple[int, ...]]:
    """The tokens of every cell with tokens below `period`."""
    slots = np.arange(period // interleave.ranks).reshape(-1, tile_tokens)
    return frozenset(map(tuple, token_of(slots, interleave).tolist()))
