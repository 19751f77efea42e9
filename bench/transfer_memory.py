"""Memory for caches: host memory in huge pages or in ordinary ones, or memory of a GPU."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import torch

_HUGE_BYTES = 2 << 20
_NO_HUGE_PAGES = 15
"""MADV_NOHUGEPAGE, which Python's mmap does not name everywhere."""


class Memory:
    """`num_bytes` of one value.

    Attributes:
        tensor: uint8 `[num_bytes]`.
        huge_bytes: how much of it the system says is in huge pages; 0 on a GPU.
    """

    def __init__(self, num_bytes: int, *, huge: bool, device: torch.device, value: int = 0) -> None:
        self.device = device
        self.huge_bytes = 0
        if device.type == "cuda":
            self.tensor = torch.full((num_bytes,), value, dtype=torch.uint8, device=device)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # without them Python shares it, which is other memory
        mapped = mmap.mmap(-1, num_bytes + _HUGE_BYTES, flags=flags)
        mapped.madvise(mmap.MADV_HUGEPAGE if huge else _NO_HUGE_PAGES)  # before the first touch
        whole = np.frombuffer(mapped, dtype=np.uint8)
        start = -int(whole.ctypes.data) % _HUGE_BYTES
        part = whole[start : start + num_bytes]
        part[:] = value
        self.tensor = torch.from_numpy(part)
        self.huge_bytes = huge_bytes_at(self.address)

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.tensor.data_ptr()

    @property
    def storages(self) -> tuple[torch.Tensor, ...]:
        """As `KvCaches` has them."""
        return (self.tensor,)

    def array(self, run_bytes: int) -> np.ndarray:
        """Host memory as uint8 `[runs, run_bytes]`, sharing it."""
        count = len(self.tensor) // run_bytes
        return np.asarray(self.tensor.numpy()[: count * run_bytes].reshape(count, run_bytes))


def huge_bytes_at(address: int) -> int:
    """Facts of /proc about the mapping that holds the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2:
            inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


class IoVectors:
    """`process_vm_readv` of pieces, 1,024 at a time.

    Args:
        local, remote: addresses, int64 `[n]`.
    """

    BATCH = 1024

    def __init__(self, pid: int, local: np.ndarray, remote: np.ndarray, piece_bytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call = self._libc.process_vm_readv
        self._call.restype = ctypes.c_ssize_t
        self._pid = pid
        self._vectors = [np.empty((len(side), 2), dtype=np.int64) for side in (local, remote)]
        for vectors, side in zip(self._vectors, (local, remote), strict=True):
            vectors[:, 0] = side
            vectors[:, 1] = piece_bytes
        self._piece_bytes = piece_bytes

    def read(self) -> None:
        """Read them all.

        Raises:
            OSError: the kernel refuses, or reads less.
        """
        local, remote = self._vectors
        step = self.BATCH if self._piece_bytes < 1 << 20 else 64  # one call moves less than 2 GiB
        for first in range(0, len(local), step):
            count = min(step, len(local) - first)
            found = self._call(
                self._pid,
                ctypes.c_void_p(int(local[first:].ctypes.data)),
                ctypes.c_ulong(count),
                ctypes.c_void_p(int(remote[first:].ctypes.data)),
                ctypes.c_ulong(count),
                ctypes.c_ulong(0),
            )
            if found != count * self._piece_bytes:
                raise OSError(ctypes.get_errno(), f"process_vm_readv read {found} B of {count * self._piece_bytes}")
