"""Contiguous runs: how the bytes of one block lie on two sides at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.protocol.geometry import PagedTensor


@dataclass(frozen=True, slots=True)
class Run:
    """`length` bytes that lie together on both sides; offsets are from the start of the block."""

    local_offset: int
    remote_offset: int
    length: int


def cell_offsets(tensor: PagedTensor) -> np.ndarray:
    """Offsets of all cells of a block from its start: int64 `[heads, tiles]`, by the address formula."""
    heads = np.arange(len(tensor.heads), dtype=np.int64)[:, None] * tensor.head_stride
    tiles = np.arange(tensor.tiles, dtype=np.int64)[None, :] * tensor.tile_stride
    return np.asarray(heads + tiles, dtype=np.int64)


def shared_runs(local: PagedTensor, remote: PagedTensor) -> tuple[Run, ...]:
    """The runs of one block, in local order, merged as far as both sides allow.

    Both tensors have equal heads, tiles and cells; their strides may differ.

    Example: 2 heads, 4 tiles, cells of 8 bytes. With head stride 32 and tile stride 8 on both sides: one run of
    64 bytes. With head stride 8 and tile stride 16 on the remote side (tokens outermost): eight runs of 8 bytes.
    """
    here, there = cell_offsets(local).ravel(), cell_offsets(remote).ravel()
    order = np.argsort(here, kind="stable")
    here, there = here[order], there[order]
    cell = local.cell_bytes
    breaks = np.flatnonzero((np.diff(here) != cell) | (np.diff(there) != cell)) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(here)]))
    return tuple(
        Run(int(here[start]), int(there[start]), int(stop - start) * cell)
        for start, stop in zip(starts, stops, strict=True)
    )
