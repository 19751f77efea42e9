"""The KV caches of this worker, their device, and marks that are reached when work launched there has finished.

The step thread sets marks, the transfer thread polls them. Neither waits. A thread of kvferry that uses the device
calls `use_device` first; the step thread is the engine's, which has set it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

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
