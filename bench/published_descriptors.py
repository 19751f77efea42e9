"""How vLLM's NixlConnector (0.32, pull) makes its descriptors for tensor-parallel sizes that differ, written anew.

Per peer it makes one descriptor for every (region, block): for regions whose heads divide over the sides, addresses as
Nx3 arrays. Where the producer has more ranks, the local array becomes a Python list, and from it one more list of
tuples per producer rank, each tuple the rank's share of the block. Per request it adds the blocks to every region's
offset. Its regions are the layers: K and V lie in one. `tests/connector/test_published_descriptors.py` compares with
the installed functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Triple = tuple[int, int, int]
"""Address, length, device."""


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
