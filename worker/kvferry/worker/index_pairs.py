"""The index arrays of a read, checked before a fabric sees them."""

from __future__ import annotations

import numpy as np

from kvferry.worker.fabric import Indices, InvalidRequest, LocalDescriptors, RemoteDescriptors


def check_index_pairs(
    local: LocalDescriptors, local_indices: Indices, remote: RemoteDescriptors, remote_indices: Indices
) -> None:
    """Raise `InvalidRequest` unless both are C-contiguous int32[n] of one n and every index is inside its list.

    NIXL would check the ranges as well, but not say which index it was, and converts other dtypes with a copy.
    """
    _check_side("local", local.count, local_indices)
    _check_side("remote", remote.count, remote_indices)
    if len(local_indices) != len(remote_indices):
        raise InvalidRequest("post read", f"{len(local_indices)} local indices, {len(remote_indices)} remote ones")


def _is_inside(indices: Indices, count: int) -> bool:
    if len(indices) == 1:  # a lease's slot, twice a load
        return 0 <= int(indices[0]) < count
    # One pass: as unsigned numbers, negative ones are larger than any count.
    return bool(indices.view(np.uint32).max() < count)


def _check_side(side: str, count: int, indices: Indices) -> None:
    if indices.dtype != np.int32 or indices.ndim != 1 or not indices.flags.c_contiguous:
        found = f"{indices.dtype}{list(indices.shape)}"
        raise InvalidRequest("post read", f"{side} indices are {found}; expected a contiguous int32[n]")
    if len(indices) and not _is_inside(indices, count):
        outside = indices[(indices < 0) | (indices >= count)]
        raise InvalidRequest("post read", f"{side} index {outside[0]} is outside [0, {count})")
