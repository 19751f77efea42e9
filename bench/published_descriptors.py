"""How vLLM's NixlConnector (0.32, pull) makes its descriptors for tensor-parallel sizes that differ, written anew.

Per peer it makes one descriptor for every (region, block): for regions whose heads divide over the sides, addresses as
Nx3 arrays. Where the producer has more ranks, the local array becomes a Python list, and from it one more list of
tuples per producer rank, each tuple the rank's share of the block. Per request it adds the blocks to every region's
offset. Its regions are the layers: K and V lie in one. `tests/connector/test_published_descriptors.py` compares with
the installed functions.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.llama import BLOCK_TOKENS, HEADS, LAYERS, TOKEN_BYTES
from bench.nixl_prep import Registered
from kvferry.plan.blocks import RequestBlocks

Triple = tuple[int, int, int]
"""Address, length, device."""
_PEAK_BLOCKS = 500
_Result = TypeVar("_Result")


def block_descriptors(
    bases: Sequence[int], blocks: int, block_stride: int, length: int, offset: int = 0
) -> NDArray[np.uint64]:
    """One descriptor for every region and block, uint64 `[regions · blocks, 3]`."""
    parts = []
    for base in bases:
        rows = np.empty((blocks, 3), dtype=np.uint64)
        rows[:, 0] = base + offset + np.arange(blocks, dtype=np.uint64) * np.uint64(block_stride)
        rows[:, 1] = length
        rows[:, 2] = 0
        parts.append(rows)
    return np.concatenate(parts)


def split_for_rank(whole: Sequence[Sequence[int]], ranks: int, slot: int) -> list[Triple]:
    """The local descriptors of one producer rank: its share of every block. `whole` is a list, made once per peer."""
    shares = []
    for address, length, device in whole:
        share = length // ranks
        shares.append((address + slot * share, share, device))
    return shares


def descriptor_ids(blocks: Sequence[int], regions: int, blocks_of_region: int) -> NDArray[np.int64]:
    """The descriptors of one side of one request: every region's, block by block."""
    firsts = np.cumsum([0, *[blocks_of_region] * (regions - 1)])
    return np.asarray((firsts[:, None] + np.asarray(blocks, dtype=np.int32)[None, :]).ravel())


@dataclass(frozen=True)
class Published:
    """Figures of the published algorithm, scaled to all blocks: descriptors and NIXL, memory, one request."""

    ms: float
    peak_mb: float
    request_ms: float


def best_of(repeats: int, what: Callable[[], _Result]) -> tuple[float, _Result]:
    """Processor seconds of the best repetition, and the last result."""
    best_s = float("inf")
    for _ in range(repeats):
        start_s = time.thread_time()
        result = what()
        best_s = min(best_s, time.thread_time() - start_s)
    return best_s, result


def measure_published(
    consumer_tp: int, producer_tp: int, blocks: int, given_blocks: int, request: RequestBlocks, registered: Registered
) -> Published:
    """Descriptors of both sides for every producer rank that is read, with `given_blocks` of the caches' `blocks`."""
    readers = max(1, producer_tp // consumer_tp)
    here, there = (HEADS // tp * BLOCK_TOKENS * TOKEN_BYTES for tp in (consumer_tp, producer_tp))

    def layers(base: int, size: int) -> list[int]:
        return [base + layer * blocks * size for layer in range(LAYERS)]

    total_s, local = best_of(1, lambda: block_descriptors(layers(registered.local, here), given_blocks, here, here))
    seconds, whole = best_of(1, lambda: local.tolist() if readers > 1 else [])
    total_s += seconds
    for rank in range(readers):

        def make(rank: int = rank) -> tuple[object, object]:
            mine = split_for_rank(whole, readers, rank) if whole else local
            bases = layers(registered.remote[rank], there)
            return mine, block_descriptors(bases, given_blocks, there, min(here, there))

        made_s, (mine, theirs) = best_of(1, make)
        local_s, _ = best_of(1, partial(registered.prepare_triples, None, mine))
        remote_s, _ = best_of(1, partial(registered.prepare_triples, rank, theirs))
        total_s += made_s + local_s + remote_s
    sides = [side for side in (request.local[0], request.remote[0]) for _ in range(readers)]
    request_s, _ = best_of(20, lambda: [descriptor_ids(of, LAYERS, blocks) for of in sides])
    peak = _peak_bytes_per_block(here, readers, min(given_blocks, _PEAK_BLOCKS))
    return Published(total_s * blocks / given_blocks * 1e3, peak * blocks / 1e6, request_s * 1e3)


def _peak_bytes_per_block(block_bytes: int, readers: int, blocks: int) -> float:
    """Most bytes that Python holds at a time; of the split lists, only one rank's live at a time."""
    tracemalloc.start()
    made: list[object] = [block_descriptors([1 << 44] * LAYERS, blocks, block_bytes, block_bytes) for _ in range(2)]
    if readers > 1:
        whole = block_descriptors([1 << 44] * LAYERS, blocks, block_bytes, block_bytes).tolist()
        made += [whole, split_for_rank(whole, readers, 0)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / blocks
