"""The memory that a relayout may touch: whole allocations, by address."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.relayout.wave_table import InvalidTable


class Memory:
    """Allocations by address.

    Args:
        tensors: any tensors; the whole storage of each counts, once.
        name: what it is, for errors: `source`, `destination`.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], name: str) -> None:
        self.name = name
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._bytes = [
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for _, tensor in sorted(storages.items())
        ]
        self._starts = np.array([whole.data_ptr() for whole in self._bytes], dtype=np.int64)
        self._stops = self._starts + np.array([whole.numel() for whole in self._bytes], dtype=np.int64)

    def allocations_of(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
        """Per range `[start, stop)` the index of the allocation that it lies in.

        Raises:
            InvalidTable: a range lies in none.
        """
        index = np.searchsorted(self._starts, start, side="right") - 1
        outside = index < 0
        if len(self._stops):
            outside |= stop > self._stops[index]
        if outside.any():
            wrong = int(np.flatnonzero(outside)[0])
            raise InvalidTable(f"{self.name} [{start[wrong]:#x}, {stop[wrong]:#x}) lies in none of the allocations")
        return np.asarray(index)

    def bytes_of(self, allocation: int) -> torch.Tensor:
        """An allocation as uint8 `[bytes]`."""
        return self._bytes[allocation]

    def start_of(self, allocation: int) -> int:
        """Address of an allocation's first byte."""
        return int(self._starts[allocation])
