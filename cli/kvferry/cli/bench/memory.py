"""Memory that is registered with NIXL: in the host, and on GPU 0 through the CUDA driver."""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import numpy as np

from kvferry.cli.bench.cases import Bytes
from kvferry.cli.bench.messages import BenchFailed, Device, Kind
from kvferry.cli.doctor.cuda_memory import CudaMemory, CudaUnavailable
from kvferry.protocol.errors import KvferryError
from kvferry.worker.fabric.port import DescriptorRows, Fabric, MemoryKind, Region

_MOST_REASON = 400


class Memory(Protocol):
    """Some bytes at an address."""

    @property
    def kind(self) -> Kind:
        """The kind of memory that they are in."""
        ...

    @property
    def address(self) -> int:
        """The address of the first byte."""
        ...

    @property
    def length(self) -> int:
        """The number of bytes."""
        ...

    def write(self, new: Bytes) -> None:
        """Replace the first bytes."""
        ...

    def read(self, length: int) -> Bytes:
        """The first bytes."""
        ...


class HostMemory:
    """Pages of this process."""

    kind: Kind = "DRAM"

    def __init__(self, length: int) -> None:
        self._bytes = np.frombuffer(mmap.mmap(-1, length), np.uint8)
        self._bytes[:] = 0
        self.address, self.length = int(self._bytes.ctypes.data), length

    def write(self, new: Bytes) -> None:
        """Replace the first bytes."""
        self._bytes[: len(new)] = new

    def read(self, length: int) -> Bytes:
        """The first bytes, not a copy of them."""
        return self._bytes[:length]


class GpuMemory(CudaMemory):
    """Bytes on GPU 0. Raises `CudaUnavailable`."""

    kind: Kind = "VRAM"

    def write(self, new: Bytes) -> None:
        """Replace the first bytes."""
        self._call("cuMemcpyHtoD_v2", *self._triple(self.address, new.ctypes.data, len(new)))

    def read(self, length: int) -> Bytes:
        """A copy of the first bytes."""
        copy = np.empty(length, np.uint8)
        self._call("cuMemcpyDtoH_v2", *self._triple(copy.ctypes.data, self.address, length))
        return copy

    @staticmethod
    def _triple(target: int, source: int, length: int) -> tuple[ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t]:
        return ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(length)


def registered_memories(fabric: Fabric, device: Device, length: int) -> tuple[list[Memory], str]:
    """Registered memory of each requested and available kind; and why there is none on a GPU, `""` if there is.

    Raises:
        BenchFailed: GPU memory was requested, and there is none.
        FabricUnavailable: host memory could not be registered.
    """
    found: list[Memory] = []
    if device != "cuda":
        host = HostMemory(length)
        fabric.register([Region(host.address, length, MemoryKind.DRAM)])
        found.append(host)
    if device == "cpu":
        return found, ""
    try:
        gpu = GpuMemory(length)
        fabric.register([Region(gpu.address, length, MemoryKind.VRAM)])
    except (CudaUnavailable, KvferryError) as refused:
        if device == "cuda":
            raise BenchFailed(f"no GPU memory here ({refused}); --device cpu leaves it out") from None
        return found, " ".join(str(refused).split())[:_MOST_REASON]
    return [*found, gpu], ""


def rows_of(kind: Kind, address: int, length: int, run_bytes: int) -> DescriptorRows:
    """`length` bytes at an address, in descriptors of `run_bytes`."""
    return DescriptorRows.of(MemoryKind(kind), [(address, run_bytes, 0, run_bytes, length // run_bytes)])
