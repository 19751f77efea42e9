"""Memory whose pages go and come back at the same addresses, as vLLM's allocator for sleep mode does with a GPU's.

While they are away every access ends the process with SIGSEGV: a read that a sleep has overlooked cannot go unnoticed.
They come back with other bytes, so that one that comes too late cannot be right by chance.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.worker.peer_memory.shared_file import SharedFile

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]


@dataclass(frozen=True, slots=True)
class _Area:
    """One allocation. `descriptor` is that of its file, -1 for memory of this process alone."""

    address: int
    num_bytes: int
    descriptor: int

    def map(self, protection: int, flags: int, descriptor: int) -> None:
        """Put other pages in place of these, at once: no other thread's memory can slip in between."""
        mapped = _libc.mmap(
            self.address, self.num_bytes, protection, flags | _MAP_FIXED, descriptor, 0
        )
        assert mapped == self.address, ctypes.get_errno()

    def bytes(self) -> npt.NDArray[np.uint8]:
        memory = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        return np.ctypeslib.as_array(memory)


class SleepingMemory:
    """The allocator of one worker's caches."""

    def __init__(self) -> None:
        self._areas: list[_Area] = []
        self._files: list[SharedFile] = []
        self.is_asleep = False
        self._fill = 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Memory of this process, uint8; it is never given back."""
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        address = _libc.mmap(None, length, _READ_WRITE, _PRIVATE, -1, 0)
        area = _Area(address, length, -1)
        self._areas.append(area)
        return torch.from_numpy(area.bytes())[:num_bytes]

    def share(self, file: SharedFile) -> None:
        """Let a file's pages sleep too, in this process: in others they stay mapped, with bytes that change."""
        self._areas.append(_Area(file.address, file.num_bytes, file.allocation.fd))
        self._files.append(file)

    def sleep(self) -> None:
        """Take all pages away."""
        assert not self.is_asleep
        self.is_asleep = True
        self._fill = (self._fill + 1) % 251
        for area in self._areas:
            if area.descriptor >= 0:
                area.bytes()[:] = self._fill
            area.map(_PROT_NONE, _PRIVATE | _MAP_NORESERVE, -1)

    def wake_up(self) -> None:
        """Bring pages back, with other bytes."""
        assert self.is_asleep
        self.is_asleep = False
        for area in self._areas:
            if area.descriptor >= 0:
                area.map(_READ_WRITE, mmap.MAP_SHARED, area.descriptor)
            else:
                area.map(_READ_WRITE, _PRIVATE, -1)
            area.bytes()[:] = self._fill
