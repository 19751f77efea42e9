"""Whole blocks from one set of caches to another, all layers in one wave: device to host, host to device, or within."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvferry.worker.relayout.shape import Axis, Shape
from kvferry.worker.relayout.wave_table import InvalidTable, WaveTable


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
) -> WaveTable:
    """The table that copies block `src_block_ids[i]` of every layer to its block `dst_block_ids[i]`.

    Args:
        src_kv_caches: by layer `[blocks, …]`. Strides are the tensors' own, so that the two sides may differ in the
            order of everything behind the blocks, e.g. heads and tokens.
        dst_kv_caches: the same layers.
        src_block_ids, dst_block_ids: as many of either.

    Raises:
        InvalidTable: the layers, dtypes, sizes of a block or numbers of ids differ, or an id is not a block's.
    """
    if src_kv_caches.keys() != dst_kv_caches.keys():
        raise InvalidTable(f"layers {sorted(src_kv_caches.keys() ^ dst_kv_caches.keys())} are on one side only")
    if len(src_block_ids) != len(dst_block_ids):
        raise InvalidTable(f"{len(src_block_ids)} source blocks for {len(dst_block_ids)} destination blocks")
    shapes: dict[Shape, int] = {}
    rows = []
    for layer, source in src_kv_caches.items():
        destination = dst_kv_caches[layer]
        if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
            found = [f"{tensor.dtype} {tuple(tensor.shape[1:])}" for tensor in (source, destination)]
            raise InvalidTable(f"{layer}: blocks are {found[0]} and {found[1]}")
        for ids, tensor in ((src_block_ids, source), (dst_block_ids, destination)):
            if len(ids) and not 0 <= min(ids) <= max(ids) < len(tensor):
                raise InvalidTable(f"{layer}: blocks {min(ids)} … {max(ids)} of {len(tensor)}")
        shape = _block_shape(source, destination)
        rows.append((source.data_ptr(), destination.data_ptr(), shapes.setdefault(shape, len(shapes))))
    pieces = np.zeros((len(rows), 6), dtype=np.int64)
    pieces[:, :3] = np.array(rows, dtype=np.int64).reshape(-1, 3)
    pieces[:, 4] = len(src_block_ids)
    units = np.zeros((len(src_block_ids), 4), dtype=np.int32)
    units[:, 0], units[:, 2] = src_block_ids, dst_block_ids
    return WaveTable(tuple(shapes), pieces, units)


def _block_shape(source: torch.Tensor, destination: torch.Tensor) -> Shape:
    size = source.element_size()
    strides = [[stride * size for stride in tensor.stride()] for tensor in (source, destination)]
    axes = [Axis(*loop) for loop in zip(source.shape[1:], strides[0][1:], strides[1][1:], strict=True)]
    return Shape.of(axes, size, source_pace=(strides[0][0], 0), destination_pace=(strides[1][0], 0))
