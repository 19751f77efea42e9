"""The KV caches of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.worker.device import Device
from kvferry.worker.fabric.port import MemoryKind, Region
from kvferry.worker.peer_memory.shared_file import SharedFile


@dataclass(frozen=True, slots=True)
class KvCaches:
    """The caches of one worker, as tensors and as paged tensors.

    Attributes:
        storages: one tensor per distinct allocation, any dtype; every paged tensor lies in one of them.
        tensors: their description for peers.
        device: the device that holds all of them.
        shared: the files that the storages lie in; empty if they lie in memory of this process alone.
    """

    storages: tuple[torch.Tensor, ...]
    tensors: tuple[PagedTensor, ...]
    device: Device
    shared: tuple[SharedFile, ...] = ()

    @classmethod
    def from_views(
        cls,
        views: Mapping[tuple[str, str], torch.Tensor],
        *,
        first_head: int = 0,
        shared: Sequence[SharedFile] = (),
    ) -> KvCaches:
        """The caches of one cache group, whose blocks are not packed in any way.

        Args:
            views: by layer and kind (`k`, `v`, …) `[blocks, heads, tokens, size]`, with any strides but that of the
                last axis, which is 1. All lie on one device.
            first_head: the first of the model's heads that lies here.
            shared: the files that all of them lie in, so that consumers of this host can map them.

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
            # Strides in bytes: peers may have another element size.
            block_stride, head_stride, tile_stride, _ = (
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
                    cell_bytes=size * view.itemsize,
                    format=Format(dtype=str(view.dtype).removeprefix("torch.")),
                )
            )
        first_view = next(iter(views.values()))
        device = Device(first_view.device)
        return cls(tuple(views.values()), tuple(tensors), device, tuple(shared))

    @property
    def kind(self) -> MemoryKind:
        if self.device.is_cuda:
            return MemoryKind.VRAM
        return MemoryKind.DRAM

    @property
    def device_index(self) -> int:
        """The device in NIXL's counting."""
        return self.device.index

    def regions(self) -> list[Region]:
        """The memory to register: whole allocations, each once, however many layers lie in it."""
        # By address: vLLM gives cache groups the same bytes, and an allocation is registered once.
        by_address: dict[int, Region] = {}
        for tensor in self.storages:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            by_address[address] = Region(
                address, storage.nbytes(), self.kind, self.device_index
            )
        return list(by_address.values())
