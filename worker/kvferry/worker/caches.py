"""The KV caches of a worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.protocol.geometry import PagedTensor
from kvferry.worker.device import Device
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
    device: Device

    @property
    def kind(self) -> MemoryKind:
        return MemoryKind.VRAM if self.device.is_cuda else MemoryKind.DRAM

    @property
    def device_index(self) -> int:
        """The device in NIXL's counting."""
        return self.device.index

    def regions(self) -> list[Region]:
        """The memory to register: whole allocations, each once, however many layers lie in it."""
        seen: dict[int, Region] = {}
        for tensor in self.storages:
            storage = tensor.untyped_storage()
            address, length = storage.data_ptr(), storage.nbytes()
            seen[address] = Region(address, length, self.kind, self.device_index)
        return list(seen.values())
