"""Host memory that other processes of this host can map: sealed memory files (memfd).

    exporter                                          importer
    SharedFile(n): made, sealed, mapped          →    map_shared(pid, allocation)
    ┌────────────────────┬──────────────┐             /proc/PID/fd/FD: opened, name, seals and size
    │ n bytes for caches │ …, the proof │             checked, mapped read-only
    └────────────────────┴──────────────┘

Whoever has a map can be killed by the file: a read behind its end is SIGBUS, which no handler survives. So the file is
sealed against shrinking when it is made, and nothing is mapped that is not. The kernel frees it with the last map and
descriptor, so nothing stays of a process that was killed, as it would of a named segment in /dev/shm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.protocol.handshake import SharedAllocation
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.peer_memory.port import PROOF_BYTES, NotMappable

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedFile:
    """Memory for caches, zeroed, in a file of its own.

    Args:
        num_bytes: that can be used. The file has whole pages, and the proof.

    Attributes:
        tensor: all of the file, uint8. Its storage is what the fabric registers.
        num_bytes: of `tensor`.

    Raises:
        OSError: there is too little memory, or there are too many open files.
    """

    def __init__(self, num_bytes: int) -> None:
        self._name = secrets.token_hex(16)
        self.num_bytes = -(-(num_bytes + PROOF_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._descriptor = os.memfd_create(_file_name(self._name), flags)
        os.ftruncate(self._descriptor, self.num_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        # The tensor keeps the map; with its last view the memory is free.
        self.tensor = torch.frombuffer(
            mmap.mmap(self._descriptor, self.num_bytes), dtype=torch.uint8
        )
        self.tensor.numpy()[-PROOF_BYTES:] = np.frombuffer(
            secrets.token_bytes(PROOF_BYTES), np.uint8
        )

    def __del__(self) -> None:
        # What has been mapped stays mapped. Missing where the file could not be made.
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.tensor.data_ptr()

    @property
    def region(self) -> Region:
        """All of it, for the fabric."""
        return Region(self.address, self.num_bytes, MemoryKind.DRAM)

    @property
    def allocation(self) -> SharedAllocation:
        """The file, for the description of its worker."""
        return SharedAllocation(
            address=self.address,
            num_bytes=self.num_bytes,
            fd=self._descriptor,
            name=self._name,
        )


def map_shared(pid: int, allocation: SharedAllocation) -> NDArray[np.uint8]:
    """The file of another process, read-only; it stays mapped as long as the array or a view of it lives.

    Raises:
        NotMappable: there is no such process or file here, it may not be opened, or it is not what was described.
    """
    path = f"/proc/{pid}/fd/{allocation.fd}"
    expected = f"/memfd:{_file_name(allocation.name)} (deleted)"
    try:
        # Before it is opened: a description names any number, and opening a device or a pipe has effects.
        target = os.readlink(path)
        if target != expected:
            raise NotMappable(f"{path} is {target!r}, not {expected!r}")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise NotMappable(f"{path} cannot be opened: {error.strerror}") from None
    try:
        _check_file(fd, path, expected, allocation.num_bytes)
        mapped = mmap.mmap(
            fd, allocation.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
        )
    except OSError as error:
        raise NotMappable(f"{path} cannot be mapped: {error.strerror}") from None
    finally:
        os.close(fd)
    return np.frombuffer(mapped, np.uint8)


def has_begun_to_exit(pid: int, allocation: SharedAllocation) -> bool:
    """Whether a process that keeps this file open is about to end, or has: sooner than its pidfd tells."""
    # The kernel takes its address space, then its table of open files, then closes these, and tells of its end last. So
    # while it has both, none of its files is closed yet, a GPU's driver included.
    try:
        os.readlink(f"/proc/{pid}/exe")
        target = os.readlink(f"/proc/{pid}/fd/{allocation.fd}")
    except OSError:
        return True
    return target != f"/memfd:{_file_name(allocation.name)} (deleted)"


def _check_file(fd: int, path: str, expected: str, num_bytes: int) -> None:
    """Check the open file, whatever became of its number meanwhile.

    Raises:
        NotMappable: it is another file, may shrink, or has another size.
        OSError: it is no file that can be sealed.
    """
    target = os.readlink(f"/proc/self/fd/{fd}")
    status = os.fstat(fd)
    if target != expected or not stat.S_ISREG(status.st_mode):
        raise NotMappable(f"{path} was {target!r} when it was opened, not {expected!r}")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise NotMappable(
            f"{path} is not sealed against shrinking: reading it could raise SIGBUS"
        )
    if status.st_size != num_bytes:
        raise NotMappable(
            f"{path} has {status.st_size} bytes; described as {num_bytes}"
        )


def _file_name(name: str) -> str:
    return f"kvferry-{name}"
