"""Bundles: paged tensors that are read alike, as contiguous runs with axes around them. `run_merger` makes them."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.plan.conversion import DtypeConversion
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.geometry import PagedTensor, Range

MAX_DESCRIPTORS = (1 << 31) - 1
"""Most descriptors of one plan, all its routes together: their indices are int32, in NIXL too.

That is a cache of 512 GiB in runs of 256 bytes. To divide larger ones over several tables was tried and taken out: no
worker has as much memory.
"""


class RunAxis(NamedTuple):
    """One loop around a run: number of steps, and the stride on each side."""

    steps: int
    local_stride: int
    remote_stride: int


class UnitStride(NamedTuple):
    """Strides of one side from block to block and from position to position; `blocks` bounds its rows."""

    block_stride: int
    position_stride: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Runs that are read alike: the same axes around runs of one length, at several places.

    Attributes:
        tokens: how the tokens correspond.
        run: contiguous length on both sides: bytes, or elements if there is a conversion.
        axes: the loops around a run; one descriptor per combination.
        local_unit_stride, remote_unit_stride: strides of each side from one unit to the next.
        bases: per place the local and the remote address of the first run at block 0, position 0.
        members: per place the indices of the slices that are merged there.
        conversions: per place the conversion of its elements; empty if bytes are copied unchanged.
    """

    tokens: TokenMap
    run: int
    axes: tuple[RunAxis, ...]
    local_unit_stride: UnitStride
    remote_unit_stride: UnitStride
    bases: tuple[tuple[int, int], ...]
    members: tuple[tuple[int, ...], ...]
    conversions: tuple[DtypeConversion, ...] = ()

    @property
    def run_bytes(self) -> int:
        """Bytes of one run on the producer, which is one descriptor."""
        _, remote_item = self._items
        return self.run * remote_item

    @property
    def local_run_bytes(self) -> int:
        """Bytes of one run in the consumer's cache."""
        local_item, _ = self._items
        return self.run * local_item

    @property
    def dtypes(self) -> tuple[str, str] | None:
        """The remote and the local type of the elements, the same at all places; None if bytes are copied unchanged."""
        if not self.conversions:
            return None
        return self.conversions[0][:2]

    @property
    def _items(self) -> tuple[int, int]:
        """Bytes of an item of `run`, local and remote."""
        # The conversions of all places have the same dtypes; their scales may differ.
        if self.conversions:
            return self.conversions[0].items
        return 1, 1

    @property
    def runs_per_place(self) -> int:
        """Descriptors of one unit at one place."""
        return math.prod(axis.steps for axis in self.axes)

    @property
    def unit_runs(self) -> int:
        """Descriptors of one unit."""
        return self.runs_per_place * len(self.bases)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit, on the producer."""
        return self.unit_runs * self.run_bytes


def grid(shape: Sequence[int]) -> np.ndarray:
    """All combinations of the indices of axes, int64 `[axes, combinations]`; one empty combination without axes."""
    return np.asarray(
        np.indices(shape, dtype=np.int64).reshape(len(shape), math.prod(shape))
    )


class TensorSlice(NamedTuple):
    """One *part* of a route, a `Slice` of the plan once it is placed: two tensors, the global heads, and how the tokens
    correspond.

    Parts with the same correspondence share one token map object: shapes are compared by its identity.
    """

    local: PagedTensor
    remote: PagedTensor
    heads: Range
    tokens: TokenMap
    conversion: DtypeConversion | None = None


class ReadExtent(enum.Enum):
    """The part of a block that is read in the producer's shape."""

    UNITS = "units"
    """The needed units of the needed heads."""
    BLOCKS = "blocks"
    """Whole blocks of the needed heads."""
    ALL_HEADS = "blocks of all heads"
    """Whole blocks of all heads that the producer worker holds."""
