"""The KV caches of this worker, their device and marks of its work, and host memory that it copies from and to.

A mark is reached when the work launched before it has finished. The step thread sets marks, the transfer thread polls
them. Neither waits. A thread of kvferry that uses the device calls `use_device` first; the step thread is the engine's,
which has set it.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvferry.protocol.errors import InvalidConfig
from kvferry.protocol.geometry import PagedTensor
from kvferry.worker.fabric.port import MemoryKind, Region


@dataclass(frozen=True, slots=True)
class KvCaches:
    """The caches of one worker, as tensors and as paged tensors.

    Attributes:
        storages: one tensor per distinct allocation, any dtype; every paged tensor lies in one of them.
        tensors: their description for peers.
        device: the device that holds all of them.
    """

    storages: tuple[torch.Tensor, ...]
    tensors: tuple[PagedTensor, ...]
    device: torch.device

    @property
    def kind(self) -> MemoryKind:
        return MemoryKind.VRAM if self.device.type == "cuda" else MemoryKind.DRAM

    @property
    def device_index(self) -> int:
        """The device in NIXL's counting: the ordinal of a GPU, 0 for host memory."""
        return (self.device.index or 0) if self.device.type == "cuda" else 0

    def regions(self) -> list[Region]:
        """The memory to register: whole allocations, each once, however many layers lie in it."""
        seen: dict[int, Region] = {}
        for tensor in self.storages:
            storage = tensor.untyped_storage()
            address, length = storage.data_ptr(), storage.nbytes()
            seen[address] = Region(address, length, self.kind, self.device_index)
        return list(seen.values())


class DeviceMark(Protocol):
    """A point in the device's work."""

    def reached(self) -> bool:
        """Whether everything launched before the mark has finished. Never waits."""
        ...


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class _Reached:
    def reached(self) -> bool:
        return True


class DeviceClock:
    """Marks points in one device's work. A device that is not CUDA is assumed to be synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> DeviceMark:
        """Mark everything launched so far on the calling thread's current stream."""
        if self._device.type != "cuda":
            return _Reached()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(event)


def use_device(device: torch.device) -> None:
    """Make a device the calling thread's current one; to be called before the thread uses it in any way.

    A thread begins with GPU 0: its first call, even an event's query, would create a context there, of hundreds of
    megabytes for each worker of the node.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait for the calling thread's current stream; it blocks, so call it only while the caches are registered."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class HostMemory:
    """Host memory of an exact size: whole pages of private memory, zero at first and pinned until `unpin`.

    torch rounds pinned memory up to a power of two: 33 GiB would take 64. So this maps pages, huge ones where the
    system has them, and registers them with CUDA.

    Args:
        num_bytes: at least 1; rounded up to whole pages.
        device: the device that copies from and to it; nothing is pinned for the CPU.

    Attributes:
        tensor: uint8 `[num_bytes]`, the memory without the rounding.

    Raises:
        InvalidConfig: the system has too little memory, or CUDA refuses to pin it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._mapped_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, self._mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise self._refused(f"the system's error: {error}") from None
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8))[:num_bytes]
        self._is_pinned = device.type == "cuda"
        if self._is_pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(self.tensor.data_ptr(), self._mapped_bytes, 0))
            if code:
                raise self._refused(f"cudaHostRegister returned error {code}")

    def unpin(self) -> None:
        """Unregister the pages, once nothing copies from or to them any more. Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.tensor.data_ptr())

    def _refused(self, reason: str) -> InvalidConfig:
        return InvalidConfig(
            "kv_buffer_device",
            "cpu",
            f"room for {self._mapped_bytes} bytes of pinned host memory ({reason}): use a smaller KV cache, "
            "or raise the memory limits of the host or container (memlock included)",
        )
