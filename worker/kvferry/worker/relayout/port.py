"""The port of the relayout, and the memory that one may touch: whole allocations, by address.

Every implementation passes `tests/worker/relayout/test_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.worker.device import DeviceMark
from kvferry.worker.peer_memory.port import DeviceBytes
from kvferry.worker.relayout.wave_table import (
    DESTINATION,
    SHAPE,
    SOURCE,
    InvalidTable,
    Pieces,
    Span,
    WaveTable,
)


class Relayout(Protocol):
    """Puts waves in place. Used by one thread.

    Attributes:
        launches: kernels launched for waves so far: one for each wave with units.
    """

    launches: int

    def try_start(self, table: WaveTable) -> DeviceMark | None:
        """Begin to put a wave in place; never waits.

        The bytes of the source must have arrived, and nothing that was launched earlier may still write to the
        destination. Bytes that two pieces write get the value of either.

        Returns:
            A mark that is reached when it is done: until then the source and the destination must not be accessed.
            None while too many waves are under way: call again.

        Raises:
            InvalidTable: the wave would access memory that is not its own, or is too large. Nothing was begun.
        """
        ...

    def mark(self) -> DeviceMark:
        """A mark that is reached when every wave begun so far is done, also one whose start raised."""
        ...


class BoundedRelayout(Relayout, Protocol):
    """One that says how much it takes at once: of mapped memory no pool limits the waves."""

    def most_units(self, pieces: Pieces) -> int:
        """The most units of these pieces that one wave may have, at least 1."""
        ...


_Made = TypeVar("_Made")

_FAR = 1 << 62
"""Larger than any offset: the bounds of a shape that no piece has."""


Allocation: TypeAlias = torch.Tensor | NDArray[np.uint8] | DeviceBytes
"""A tensor, of which the whole storage counts; bytes of host memory, which need not be writable; or of a device."""


class Memory:
    """Allocations by address.

    Args:
        allocations: any; each counts once.
    """

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        sizes: dict[int, int] = {}
        host_bytes: dict[int, NDArray[np.uint8]] = {}
        self._mapped: list[DeviceBytes] = []
        for allocation in allocations:
            if isinstance(allocation, DeviceBytes):
                sizes[allocation.address] = allocation.num_bytes
                # It stays mapped while it may be read.
                self._mapped.append(allocation)
                continue
            if isinstance(allocation, np.ndarray):
                address = int(allocation.ctypes.data)
                sizes[address] = allocation.nbytes
                host_bytes[address] = allocation
                continue
            storage = allocation.untyped_storage()
            address = storage.data_ptr()
            sizes[address] = storage.nbytes()
            if allocation.device.type == "cpu":
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                host_bytes[address] = whole.numpy()
        # Without memory there is one empty allocation, so that a search has an answer.
        if not sizes:
            sizes[0] = 0
            host_bytes[0] = np.empty(0, dtype=np.uint8)
        self._host_bytes = host_bytes
        self._starts = np.array(sorted(sizes), dtype=np.int64)
        all_bytes = [sizes[address] for address in sorted(sizes)]
        self._stops = self._starts + np.array(all_bytes, dtype=np.int64)

    def allocations_of(self, address: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each address the index of its allocation, or of a neighbour where it lies in none."""
        next_allocation = np.searchsorted(self._starts, address, side="right")
        return np.asarray(np.maximum(next_allocation - 1, 0))

    def around(
        self, address: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each address the range `[first, stop)` of its allocation, as offsets from the address."""
        index = self.allocations_of(address)
        return self._starts[index] - address, self._stops[index] - address

    def bytes_of(self, allocation: int) -> NDArray[np.uint8]:
        """An allocation in host memory as uint8 `[bytes]`."""
        return self._host_bytes[self.start_of(allocation)]

    def start_of(self, allocation: int) -> int:
        """Address of an allocation's first byte."""
        return int(self._starts[allocation])


class Bounds:
    """Per shape, the offsets from every piece's address at which units may begin: its allocation, less a unit.

    Made once for the pieces, so that the check of a wave costs a few numbers for each shape, whatever its size. No
    wave is put in place unchecked: the kernel itself writes wherever its table says.
    """

    def __init__(self, pieces: Pieces, sources: Memory, destinations: Memory) -> None:
        self._sources = _spans(pieces, SOURCE, sources)
        self._destinations = _spans(pieces, DESTINATION, destinations)

    def check(self, table: WaveTable) -> None:
        """Refuse a wave that leaves the memory.

        Raises:
            InvalidTable: a unit of a shape reaches out of the allocation of one of its pieces.
        """
        nearest = farthest = 0
        if table.shifts is not None:
            # Without a shift the wave has no pieces.
            if not len(table.shifts):
                return
            nearest = int(table.shifts.min())
            farthest = int(table.shifts.max())
        for number, reach in enumerate(table.reaches()):
            if reach is None:
                continue
            (low, high), destination = reach
            block = table.pieces.shapes[number].source_unit_stride[0]
            source = (low + nearest * block, high + farthest * block)
            _check_span(f"source of shape {number}", source, self._sources[number])
            _check_span(
                f"destination of shape {number}",
                destination,
                self._destinations[number],
            )


def _spans(pieces: Pieces, side: int, memory: Memory) -> list[Span]:
    """For each shape the offsets at which its units may begin on one side, whichever of its pieces they are of."""
    start, stop = memory.around(pieces.rows[:, side])
    spans: list[Span] = []
    for number, shape in enumerate(pieces.shapes):
        own = pieces.rows[:, SHAPE] == number
        last = stop[own] - shape.extents[side]
        spans.append((int(start[own].max(initial=-_FAR)), int(last.min(initial=_FAR))))
    return spans


def _check_span(name: str, reached: Span, allowed: Span) -> None:
    low, high = reached
    lowest, highest = allowed
    if low < lowest or high > highest:
        raise InvalidTable(
            f"{name} at offsets {low} … {high} lies in none of the allocations; "
            f"expected {lowest} … {highest}"
        )


class OncePerPieces(Generic[_Made]):
    """Caches a value computed from pieces for as long as they live; the value must not refer to them."""

    def __init__(self, make: Callable[[Pieces], _Made]) -> None:
        self._make = make
        # Weak: pieces belong to a peer and go with it.
        self._made: WeakKeyDictionary[Pieces, _Made] = WeakKeyDictionary()

    def __call__(self, pieces: Pieces) -> _Made:
        made = self._made.get(pieces)
        if made is None:
            made = self._make(pieces)
            self._made[pieces] = made
        return made
