"""The mapped memory of one worker of a producer, and whether its process lives."""

from __future__ import annotations

import bisect
import platform
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.handshake import WorkerDescription
from kvferry.protocol.slots import PAGE_IDS
from kvferry.worker.peer_memory.port import (
    PROOF_BYTES,
    DeviceBytes,
    NotMappable,
    PeerMemory,
)

# The fence loads the words of a slot itself, before and after the data. x86-64 keeps loads, and stores, in order. Other
# processors do not, and Python has no barrier.
KEEPS_ORDER = platform.machine() == "x86_64"
"""Whether this machine's loads are seen in the order of the program."""

_Number = TypeVar("_Number", np.uint32, np.uint64)


class WorkerMapping:
    """One worker's caches, its lease table and its stream rows, as this process has them in the producer's own memory.

    What is described is found in the allocations when this is made, so that no load can read outside of them. Whoever
    has an array of it may read on after `close`.

    Attributes:
        files: read-only, in the order of the description.
        allocations: that the caches lie in: a device's, or the files.
        slots: uint64 `[slots, 2]`, the lease table.
        row_headers: uint64 `[rows, 2]`, of prompts that are being computed; None without any.
        row_pages: uint32 `[rows * pages, PAGE_IDS]`, their block ids.

    Raises:
        NotMappable: with the reason, for an operator.
    """

    def __init__(self, peer_memory: PeerMemory, worker: WorkerDescription) -> None:
        shared = worker.shared
        if shared is None:
            raise NotMappable("the producer shares no memory (mapped_reads)")
        if any(allocation.num_bytes < PROOF_BYTES for allocation in shared.allocations):
            raise NotMappable(
                f"an allocation of less than {PROOF_BYTES} bytes has no proof"
            )
        if not KEEPS_ORDER:
            raise NotMappable(f"{platform.machine()} may reorder loads")
        self._opened = peer_memory.open(shared)
        self._described = shared.allocations
        self.files = self._opened.allocations
        # All but the proof.
        self._in_files = _Addresses(
            (file.address, file.num_bytes - PROOF_BYTES) for file in shared.allocations
        )
        self.allocations: tuple[NDArray[np.uint8] | DeviceBytes, ...] = self.files
        self._in_allocations = self._in_files
        # Then no cache is looked for in the files: a kernel of the device cannot read them.
        if shared.device_allocations:
            self.allocations = self._opened.device_allocations
            self._in_allocations = _Addresses(
                (each.address, each.num_bytes) for each in shared.device_allocations
            )
        # Words are aligned: none is ever loaded half old and half new.
        table = worker.lease_table
        self.slots = self._entries(
            "the lease table", table.address, table.slots, (2, np.uint64)
        )
        self.row_headers: NDArray[np.uint64] | None = None
        self.row_pages: NDArray[np.uint32] | None = None
        rows = worker.stream_rows
        if rows is not None:
            self.row_headers = self._entries(
                "headers of rows", rows.headers, rows.rows, (2, np.uint64)
            )
            num_pages = rows.rows * rows.pages
            self.row_pages = self._entries(
                "ids of rows", rows.ids, num_pages, (PAGE_IDS, np.uint32)
            )
        for tensor in worker.tensors:
            last_block = (tensor.blocks - 1) * tensor.block_stride
            self._in_allocations.find(
                f"{tensor.layer}/{tensor.kind}",
                tensor.base,
                last_block + tensor.block_extent,
            )

    def close(self) -> None:
        """See `OpenedMemory`."""
        self._opened.close()

    def has_exited(self) -> bool:
        """See `OpenedMemory`."""
        return self._opened.has_exited()

    def may_be_freed(self) -> bool:
        """See `OpenedMemory`."""
        return self._opened.may_be_freed()

    def address_of(self, address: int) -> int:
        """Where a byte of the producer's caches is in this process.

        Raises:
            NotMappable: in none of the allocations.
        """
        number, offset = self._in_allocations.find("an address", address, 1)
        allocation = self.allocations[number]
        if isinstance(allocation, DeviceBytes):
            return allocation.address + offset
        return int(allocation.ctypes.data) + offset

    def proofs(self) -> NDArray[np.uint64]:
        """The random bytes at the end of every file: uint64 `[files, 2]`.

        The first contact reads them over NIXL too: equal ones show that both ways lead to the same memory.
        """
        proofs = [file[-PROOF_BYTES:].view(np.uint64) for file in self.files]
        return np.array(proofs, dtype=np.uint64).reshape(-1, 2)

    def proof_addresses(self) -> list[int]:
        """The addresses of the proofs in the producer's process, in the order of `proofs`."""
        return [file.address + file.num_bytes - PROOF_BYTES for file in self._described]

    def _entries(
        self, name: str, address: int, count: int, entry: tuple[int, type[_Number]]
    ) -> NDArray[_Number]:
        """A table in the producer's memory as an array `[count, numbers]`.

        Args:
            address: of its first entry, in the producer's process.
            entry: how many numbers an entry has, and their type.

        Raises:
            NotMappable: they are in none of the files, or not aligned.
        """
        numbers, dtype = entry
        number_bytes = np.dtype(dtype).itemsize
        num_bytes = count * numbers * number_bytes
        file, offset = self._in_files.find(name, address, num_bytes)
        if offset % number_bytes:
            raise NotMappable(
                f"{name} at {offset} of a file; expected a multiple of {number_bytes}"
            )
        memory = self.files[file][offset : offset + num_bytes]
        return memory.view(dtype).reshape(count, numbers)


class _Addresses:
    """Allocations of the producer's process, by its addresses: `(address, usable bytes)` of each."""

    def __init__(self, allocations: Iterable[tuple[int, int]]) -> None:
        self._allocations = list(allocations)
        self._starts = sorted(
            (address, number) for number, (address, _) in enumerate(self._allocations)
        )

    def find(self, name: str, address: int, num_bytes: int) -> tuple[int, int]:
        """The number of the allocation in which so many bytes lie, and where in it.

        Raises:
            NotMappable: none.
        """
        position = bisect.bisect_right(self._starts, (address, len(self._starts))) - 1
        if position >= 0:
            start, number = self._starts[position]
            if address + num_bytes <= start + self._allocations[number][1]:
                return number, address - start
        raise NotMappable(f"{name}: in none of the allocations that are shared")
