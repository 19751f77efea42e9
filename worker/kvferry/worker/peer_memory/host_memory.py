"""Host memory of other processes of this host, in sealed files (`shared_file`)."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.protocol.handshake import SharedAllocation, SharedMemory
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.peer_memory.port import DeviceBytes, NotMappable
from kvferry.worker.peer_memory.shared_file import SharedFile, map_shared
from kvferry.worker.peer_memory.this_process import check_near, this_process


class _Maps:
    """The files that are mapped, each once; one is forgotten with the last array of it."""

    def __init__(self) -> None:
        # The name of a file is random and never used again, so that nothing else is ever found under its key.
        self._by_file: WeakValueDictionary[
            tuple[int, SharedAllocation], NDArray[np.uint8]
        ] = WeakValueDictionary()

    def get(self, pid: int, allocation: SharedAllocation) -> NDArray[np.uint8]:
        """The map that there is of a file, or a new one.

        Raises:
            NotMappable: as `map_shared`.
        """
        mapped = self._by_file.get((pid, allocation))
        if mapped is None:
            mapped = map_shared(pid, allocation)
            self._by_file[pid, allocation] = mapped
        return mapped


class OpenedFileMemory:
    """The files of one process. See `OpenedMemory`."""

    def __init__(
        self, pid: int, maps: _Maps, allocations: Sequence[SharedAllocation]
    ) -> None:
        self._pidfd = -1
        self.device_allocations: tuple[DeviceBytes, ...] = ()
        # Before anything is opened: a number that is used again later is not taken for this process.
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise NotMappable(f"process {pid} is not found: {error.strerror}") from None
        self.allocations = tuple(maps.get(pid, each) for each in allocations)

    def __del__(self) -> None:
        self.close()

    def has_exited(self) -> bool:
        """See `OpenedMemory`."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def may_be_freed(self) -> bool:
        """See `OpenedMemory`."""
        return False

    def close(self) -> None:
        """See `OpenedMemory`."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class FileMemory:
    """`PeerMemory` of caches in host memory.

    Args:
        files: of this process, that may be exported.
    """

    def __init__(self, files: Sequence[SharedFile] = ()) -> None:
        self._files = {file.address: file for file in files}
        self._maps = _Maps()

    def add_file(self, file: SharedFile) -> None:
        """See `PeerMemory`."""
        self._files[file.address] = file

    def export(self, regions: Sequence[Region]) -> SharedMemory:
        """See `PeerMemory`."""
        shared = this_process()
        allocations: list[SharedAllocation] = []
        for region in regions:
            if region.kind is not MemoryKind.DRAM:
                why_not = "caches on a device are not mapped"
                return msgspec.structs.replace(shared, why_not=why_not)
            file = self._files.get(region.address)
            if file is None:
                why_not = "the engine has its caches in memory of its own process"
                return msgspec.structs.replace(shared, why_not=why_not)
            allocations.append(file.allocation)
        return msgspec.structs.replace(shared, allocations=tuple(allocations))

    def open(self, shared: SharedMemory) -> OpenedFileMemory:
        """See `PeerMemory`."""
        check_near(shared)
        if shared.device_allocations:
            raise NotMappable(
                "the producer's caches are on a device, this engine's in host memory"
            )
        return self.open_files(shared)

    def open_files(self, shared: SharedMemory) -> OpenedFileMemory:
        """Open the files alone, of a process that is near enough.

        Raises:
            NotMappable: as `open`.
        """
        return OpenedFileMemory(shared.pid, self._maps, shared.allocations)
