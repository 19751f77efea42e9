"""The mapped memory of one worker of a producer, and whether its process lives."""

from __future__ import annotations

import bisect
import os
import platform
import select

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.handshake import WorkerDescription
from kvferry.protocol.ids import SLOT_BYTES
from kvferry.protocol.shared_memory import SharedMemory
from kvferry.worker.peer_memory.shared_file import (
    PROOF_BYTES,
    NotMappable,
    machine_id,
    map_shared,
    pid_namespace,
)

# The fence loads the words of a slot itself, before and after the data. x86-64 keeps loads, and stores, in order. Other
# processors do not, and Python has no barrier.
KEEPS_ORDER = platform.machine() == "x86_64"
"""Whether this machine's loads are seen in the order of the program."""


class WorkerMapping:
    """See the module. The memory stays mapped as long as an array of it lives: a load that reads through it keeps it,
    and it is gone with the last one, once `close` was called.

    Attributes:
        allocations: read-only, in the order of the description.
        slots: uint64 `[slots, 2]`, the lease table.

    Raises:
        NotMappable: with the reason, for an operator.
    """

    def __init__(self, worker: WorkerDescription) -> None:
        self._pidfd = -1
        shared = _shared_here(worker)
        # Before anything is opened: a number that is used again later is not taken for this process.
        try:
            self._pidfd = os.pidfd_open(shared.pid)
        except OSError as error:
            raise NotMappable(f"process {shared.pid} is not found: {error.strerror}") from None
        self._described = shared.allocations
        self._starts = sorted(
            (allocation.address, number) for number, allocation in enumerate(shared.allocations)
        )
        self.allocations = tuple(
            map_shared(shared.pid, allocation) for allocation in shared.allocations
        )
        self.slots = self._slots(worker)
        for tensor in worker.tensors:
            last_block = (tensor.blocks - 1) * tensor.block_stride
            self._offset(
                f"{tensor.layer}/{tensor.kind}", tensor.base, last_block + tensor.block_extent
            )

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is not memory. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def has_exited(self) -> bool:
        """Whether the producer's process has ended: nothing changes in its memory any more."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def address_of(self, address: int) -> int:
        """Where a byte of the producer's process is in this one.

        Raises:
            NotMappable: in none of the allocations.
        """
        number, offset = self._offset("an address", address, 1)
        return int(self.allocations[number].ctypes.data) + offset

    def proofs(self) -> NDArray[np.uint64]:
        """The last bytes of every allocation: uint64 `[allocations, 2]`."""
        proofs = [allocation[-PROOF_BYTES:].view(np.uint64) for allocation in self.allocations]
        return np.array(proofs, dtype=np.uint64).reshape(-1, 2)

    def proof_addresses(self) -> list[int]:
        """Where they are in the producer's process."""
        return [
            allocation.address + allocation.num_bytes - PROOF_BYTES
            for allocation in self._described
        ]

    def _slots(self, worker: WorkerDescription) -> NDArray[np.uint64]:
        table = worker.lease_table
        num_bytes = table.slots * SLOT_BYTES
        number, offset = self._offset("the lease table", table.address, num_bytes)
        if offset % SLOT_BYTES:
            raise NotMappable(f"the lease table is at {offset}, not at a multiple of {SLOT_BYTES}")
        return self.allocations[number][offset : offset + num_bytes].view(np.uint64).reshape(-1, 2)

    def _offset(self, name: str, address: int, num_bytes: int) -> tuple[int, int]:
        """The number of the allocation in which so many bytes lie, and where in it."""
        position = bisect.bisect_right(self._starts, (address, len(self._described))) - 1
        if position >= 0:
            start, number = self._starts[position]
            if address + num_bytes <= start + self._described[number].num_bytes - PROOF_BYTES:
                return number, address - start
        raise NotMappable(f"{name} is in none of the allocations that are shared")


def _shared_here(worker: WorkerDescription) -> SharedMemory:
    """What a worker shares, if it is of this host.

    Raises:
        NotMappable: it is not, or it shares nothing.
    """
    shared = worker.shared
    if shared is None:
        raise NotMappable("the producer shares no memory (mapped_reads)")
    if shared.machine != machine_id():
        raise NotMappable("the producer is on another host")
    if shared.pid_namespace != pid_namespace():
        raise NotMappable(
            "the producer is in another PID namespace: start both containers with --pid=host, or hostPID"
        )
    if not shared.allocations:
        raise NotMappable(f"the producer's memory cannot be shared: {shared.why_not}")
    if not KEEPS_ORDER:
        raise NotMappable(f"loads of {platform.machine()} are not ordered")
    return shared
