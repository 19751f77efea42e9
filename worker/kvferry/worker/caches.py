"""The KV caches of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvferry.protocol.geometry import Format, PagedTensor, Range
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

    @classmethod
    def of(cls, views: Mapping[tuple[str, str], torch.Tensor], *, first_head: int = 0) -> KvCaches:
        """The caches of one cache group, whose blocks are not packed in any way.

        Args:
            views: by layer and kind (`k`, `v`, …) `[blocks, heads, tokens, size]`, with any strides but that of the
                last axis, which is 1. All lie on one device.
            first_head: the first of the model's heads that lies here.

        Raises:
            ValueError: a view has other axes, or the elements of a head and token are not contiguous.
        """
        tensors = []
        for (layer, kind), view in views.items():
            if view.dim() != 4 or view.stride(3) != 1:
                raise ValueError(
                    f"{layer}/{kind}: expected [blocks, heads, tokens, size] with contiguous sizes"
                )
            blocks, heads, tokens, size = view.shape
            block_stride, head_stride, tile_stride, item = (
                steps * view.itemsize for steps in view.stride()
            )
            tensors.append(
                PagedTensor(
                    layer=layer,
                    kind=kind,
                    group=0,
                    base=view.data_ptr(),
                    blocks=blocks,
                    block_tokens=tokens,
                    block_stride=block_stride,
                    heads=Range(first_head, first_head + heads),
                    head_stride=head_stride,
                    tile_tokens=1,
                    tile_stride=tile_stride,
                    cell_bytes=size * item,
                    format=Format(dtype=str(view.dtype).removeprefix("torch.")),
                )
            )
        return cls(tuple(views.values()), tuple(tensors), Device(next(iter(views.values())).device))

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
