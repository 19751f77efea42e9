"""The port to memory of other processes of this host: `FileMemory` for caches in files, `CudaIpcMemory` for a device's.

    exporter                                          importer
    export(regions) → SharedMemory   ─ description ─► open(shared) → OpenedMemory: read, closed with its last user

Every implementation passes `tests/worker/peer_memory/test_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.handshake import SharedMemory
from kvferry.worker.fabric.port import Region
from kvferry.worker.peer_memory.this_process import NotMappable, this_process

if TYPE_CHECKING:
    from kvferry.worker.peer_memory.shared_file import SharedFile

__all__ = [
    "PROOF_BYTES",
    "DeviceBytes",
    "NoPeerMemory",
    "NotMappable",
    "OpenedMemory",
    "PeerMemory",
]

PROOF_BYTES = 16
"""Random bytes at the end of an allocation; as long as a slot, so that they are read as slots are."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceBytes:
    """Memory of a device that is mapped into this process.

    Attributes:
        address: of its first byte here; kernels of this process's device can read it.
        allocation: keeps it open.
    """

    address: int
    num_bytes: int
    allocation: object


class OpenedMemory(Protocol):
    """The memory of one other process. An allocation stays open as long as this, an array or `DeviceBytes` of it lives,
    so a load that reads through it keeps it, whatever becomes of the peer.

    Attributes:
        allocations: files: read-only bytes, in the order in which they were exported.
        device_allocations: a device's, likewise.
    """

    allocations: tuple[NDArray[np.uint8], ...]
    device_allocations: tuple[DeviceBytes, ...]

    def has_exited(self) -> bool:
        """Whether the process has ended: nothing changes in its memory any more."""
        ...

    def may_be_freed(self) -> bool:
        """Whether the memory may be another's by now, though it is mapped. A file's stays with its last map; a device's
        may go with its process, so that what is read there counts only if this is False afterwards."""
        ...

    def close(self) -> None:
        """Give up what is not memory; it is called once no load is begun any more. Idempotent."""
        ...


class PeerMemory(Protocol):
    """What a process shares of its own memory, and opens of others'."""

    def add_file(self, file: SharedFile) -> None:
        """A file of this process, which may be exported from now on. For a device the first one's proof is copied."""
        ...

    def export(self, regions: Sequence[Region]) -> SharedMemory:
        """What other processes need to open these regions: all of them, or none and the reason."""
        ...

    def open(self, shared: SharedMemory) -> OpenedMemory:
        """Open everything that another process, or this one, has exported. A process has one mapping of an
        allocation, however often it is opened.

        Raises:
            NotMappable: with the reason, for an operator. Nothing is left open.
        """
        ...


class NoPeerMemory:
    """`PeerMemory` of a worker that maps nothing.

    Args:
        why_not: for an operator.
    """

    def __init__(self, why_not: str) -> None:
        self._why_not = why_not

    def add_file(self, file: SharedFile) -> None:
        """See `PeerMemory`; it is not exported."""

    def export(self, regions: Sequence[Region]) -> SharedMemory:
        """See `PeerMemory`."""
        return msgspec.structs.replace(this_process(), why_not=self._why_not)

    def open(self, shared: SharedMemory) -> OpenedMemory:
        """See `PeerMemory`."""
        raise NotMappable(self._why_not)
