"""A stand-in for CUDA's driver where CUDA IPC needs it: memory of the fake device lies in files, which processes map.

What is mapped is read-only: a kernel that wrote into a producer's memory would end the process.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.protocol.handshake import SharedAllocation
from kvferry.worker.device import Device
from kvferry.worker.peer_memory.cuda_ipc import DriverAllocation
from kvferry.worker.peer_memory.port import NotMappable
from kvferry.worker.peer_memory.shared_file import SharedFile, map_shared
from tests.fakes.cuda_memory import FakeDevice

DEVICE = "0" * 31 + "1"
_HANDLE = struct.Struct("<IIQ16s")
_FILE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) +/memfd:kvferry-(\w+) ")


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is mapped in this process."""

    start: int
    num_bytes: int
    inode: int
    name: str


class FakeIpcDriver:
    """`IpcDriver` of a fake device.

    Attributes:
        mapped: what is open, by its address.
        refused: raised by the next call that opens anything.
        spoiled: what is read of mapped memory is wrong.
    """

    def __init__(self, device: Device) -> None:
        self.device = DEVICE
        self.mapped: dict[int, NDArray[np.uint8]] = {}
        self.refused: NotMappable | None = None
        self.spoiled = False
        self._files: list[SharedFile] = []
        self._fake = device if isinstance(device, FakeDevice) else None
        if self._fake is not None:
            self._fake.allocate = self.allocate

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory of the fake device that other processes can open."""
        count = int(np.prod(shape))
        self._files.append(SharedFile(count))
        return self._files[-1].tensor[:count].view(shape)

    def allocation_at(self, address: int) -> DriverAllocation:
        """See `IpcDriver`."""
        file = _file_at(address)
        return DriverAllocation(file.start, file.num_bytes, file.inode)

    def export(self, start: int) -> bytes:
        """See `IpcDriver`."""
        file = _file_at(start)
        for link in Path("/proc/self/fd").iterdir():
            if link.is_symlink() and file.name in os.readlink(link):
                name = bytes.fromhex(file.name)
                handle = _HANDLE.pack(os.getpid(), int(link.name), file.num_bytes, name)
                return handle.ljust(64, b"\0")
        raise NotMappable(f"file {file.name} is closed")

    def open(self, handle: bytes, device: str) -> DriverAllocation:
        """See `IpcDriver`."""
        if self.refused is not None:
            raise self.refused
        pid, fd, num_bytes, name = _HANDLE.unpack_from(handle)
        if device != self.device:
            raise NotMappable(f"GPU {self.device} has no peer access to GPU {device}")
        file = SharedAllocation(address=0, num_bytes=num_bytes, fd=fd, name=name.hex())
        memory = map_shared(pid, file)
        start = int(memory.ctypes.data)
        self.mapped[start] = memory
        if self._fake is not None:
            self._fake.mapped[start] = num_bytes
        return DriverAllocation(start, num_bytes, 0)

    def close(self, start: int) -> None:
        """See `IpcDriver`."""
        del self.mapped[start]
        if self._fake is not None:
            del self._fake.mapped[start]

    def read(self, address: int, num_bytes: int) -> bytes:
        """See `IpcDriver`."""
        found = ctypes.string_at(address, num_bytes)
        if self.spoiled:
            return found[::-1]
        return found


def _file_at(address: int) -> _File:
    """The file that an address of this process lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _FILE.match(line)
        if found is None:
            continue
        start = int(found[1], 16)
        stop = int(found[2], 16)
        if start <= address < stop:
            return _File(start, stop - start, int(found[3]), found[4])
    raise NotMappable("its caches are not of the fake driver")
