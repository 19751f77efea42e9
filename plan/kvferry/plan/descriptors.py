"""From a route to NIXL's descriptors: strided rows once per peer, index arrays once per request.

One row is one run of one paged tensor for all blocks: `(address, length, device, stride, count)`. Row `r` has its
descriptors at `[starts[r], starts[r] + count)`, block `b` at `starts[r] + b`. Preparing costs O(tensors × runs), never
O(blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.plan.transfer_plan import Route
from kvferry.protocol.geometry import PagedTensor


@dataclass(frozen=True, slots=True)
class DescriptorTable:
    """Both sides' rows of one route, in one order, tensor-major.

    Attributes:
        local_rows, remote_rows: int64 `[R, 5]`: address, length, device, stride, count.
        local_starts, remote_starts: int64 `[R]`: index of each row's first descriptor.
        group_rows: per cache group the rows that belong to it, int64 `[r]`.
        lengths: int64 `[R]`, bytes of one descriptor of the row.
    """

    local_rows: np.ndarray
    remote_rows: np.ndarray
    local_starts: np.ndarray
    remote_starts: np.ndarray
    group_rows: Mapping[int, np.ndarray]
    lengths: np.ndarray


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Which local kernel block receives which remote one, int64 `[n]` each."""

    local: np.ndarray
    remote: np.ndarray


@dataclass(frozen=True, slots=True)
class DescriptorPairs:
    """One request's reads under one route: int32 `[n]` each, and the bytes they move."""

    local: np.ndarray
    remote: np.ndarray
    num_bytes: int


def descriptor_table(route: Route, local_device: int, remote_device: int) -> DescriptorTable:
    """The rows of a route; see the module's docstring."""
    local_rows: list[tuple[int, int, int, int, int]] = []
    remote_rows: list[tuple[int, int, int, int, int]] = []
    groups: dict[int, list[int]] = {}
    for item in route.slices:
        for run in item.runs:
            groups.setdefault(item.local.group, []).append(len(local_rows))
            local_rows.append(_row(item.local, run.local_offset, run.length, local_device))
            remote_rows.append(_row(item.remote, run.remote_offset, run.length, remote_device))
    local, remote = (np.array(rows, dtype=np.int64).reshape(-1, 5) for rows in (local_rows, remote_rows))
    return DescriptorTable(
        local_rows=local,
        remote_rows=remote,
        local_starts=_starts(local),
        remote_starts=_starts(remote),
        group_rows={group: np.array(rows, dtype=np.int64) for group, rows in groups.items()},
        lengths=local[:, 1].copy(),
    )


def descriptor_pairs(table: DescriptorTable, pairs: Mapping[int, BlockPairs]) -> DescriptorPairs:
    """The index arrays of one request.

    Within each row the pairs ascend by remote block, so that NIXL merges neighbours by itself (it merges only
    ascending, adjacent indices on both sides).
    """
    local: list[np.ndarray] = []
    remote: list[np.ndarray] = []
    num_bytes = 0
    for group, rows in table.group_rows.items():
        blocks = pairs.get(group)
        if blocks is None or not len(blocks.remote):
            continue
        order = np.argsort(blocks.remote, kind="stable")
        local.append((table.local_starts[rows][:, None] + blocks.local[order][None, :]).ravel())
        remote.append((table.remote_starts[rows][:, None] + blocks.remote[order][None, :]).ravel())
        num_bytes += int(table.lengths[rows].sum()) * len(order)
    if not local:
        empty = np.empty(0, dtype=np.int32)
        return DescriptorPairs(empty, empty, 0)
    return DescriptorPairs(np.concatenate(local).astype(np.int32), np.concatenate(remote).astype(np.int32), num_bytes)


def expand_blocks(blocks: Sequence[int], ratio: int) -> np.ndarray:
    """Kernel block ids of scheduler blocks, each of which is `ratio` kernel blocks.

    Example: `expand_blocks([7, 2], 2)` is `[14, 15, 4, 5]`.
    """
    ids = np.asarray(blocks, dtype=np.int64)
    return np.asarray((ids[:, None] * ratio + np.arange(ratio, dtype=np.int64)[None, :]).ravel(), dtype=np.int64)


def _row(tensor: PagedTensor, offset: int, length: int, device: int) -> tuple[int, int, int, int, int]:
    return (tensor.base + offset, length, device, tensor.block_stride, tensor.blocks)


def _starts(rows: np.ndarray) -> np.ndarray:
    counts = rows[:, 4]
    return np.asarray(np.cumsum(counts) - counts, dtype=np.int64)
