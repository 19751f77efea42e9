"""The port to memory of other processes of this host. `FileMemory` is what there is; caches on a device have none.

    exporter                                          importer
    export(regions) → SharedMemory   ─ description ─► open(shared) → OpenedMemory: read, closed with its last user

Every implementation passes `tests/worker/peer_memory/test_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.shared_memory import SharedMemory
from kvferry.worker.fabric.port import Region

PROOF_BYTES = 16
"""Random bytes at the end of an allocation; as long as a slot, so that they are read as slots are."""


class NotMappable(KvferryError):
    """Memory of another process cannot be mapped; it is read over NIXL."""


class OpenedMemory(Protocol):
    """The memory of one other process. An allocation stays open as long as this or an array of it lives, so a load
    that reads through it keeps it, whatever becomes of the peer.

    Attributes:
        allocations: read-only bytes, in the order in which they were exported.
    """

    allocations: tuple[NDArray[np.uint8], ...]

    def has_exited(self) -> bool:
        """Whether the process has ended: nothing changes in its memory any more."""
        ...

    def close(self) -> None:
        """Give up what is not memory; it is called once no load is begun any more. Idempotent."""
        ...


class PeerMemory(Protocol):
    """What a process shares of its own memory, and opens of others'."""

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
