"""The KV caches of this worker: the memory to register, and the bytes that a load leaves to be zeroed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvferry.plan.descriptors import BlockPairs
from kvferry.protocol.geometry import PagedTensor
from kvferry.worker.device import DeviceMark, clock_for
from kvferry.worker.fabric import MemoryKind, Region


@dataclass(frozen=True, slots=True)
class KvCaches:
    """The caches of one worker, as tensors and as paged tensors.

    Attributes:
        storages: one tensor per distinct allocation, any dtype; every paged tensor lies in one of them.
        tensors: their description, as peers get it.
        device: where all of them are.
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


class TailEraser:
    """Zeroes what a load did not write: the cells after the last token of the last block.

    A cell that holds several tokens is a whole: only cells with no loaded token at all are zeroed.
    """

    def __init__(self, caches: KvCaches) -> None:
        self._clock = clock_for(caches.device)
        self._views: dict[int, list[tuple[PagedTensor, torch.Tensor]]] = {}
        for tensor in caches.tensors:
            if tensor.tiles > 1:
                self._views.setdefault(tensor.group, []).append((tensor, _cells(tensor, caches.storages)))

    def erase(self, pairs: Mapping[int, BlockPairs], stop_token: int) -> DeviceMark | None:
        """Zero the tail of the block that holds token `stop_token - 1`, in every tensor.

        Args:
            pairs: per cache group the blocks that were loaded, the last one last.

        Returns:
            When it is done; None when there is no tail.
        """
        erased = False
        for group, views in self._views.items():
            blocks = pairs.get(group)
            if blocks is None or not len(blocks.local):
                continue
            block = int(blocks.local[-1])
            for tensor, cells in views:
                used = -(-(stop_token % tensor.block_tokens) // tensor.tile_tokens)
                if 0 < used < tensor.tiles:
                    cells[block, :, used:, :] = 0
                    erased = True
        return self._clock.mark() if erased else None


def _cells(tensor: PagedTensor, storages: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor's bytes as uint8 `[blocks, heads, tiles, cell_bytes]`, sharing its memory."""
    for storage in storages:
        whole = storage.untyped_storage()
        offset = tensor.base - whole.data_ptr()
        if 0 <= offset < whole.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(whole)
            shape = (tensor.blocks, len(tensor.heads), tensor.tiles, tensor.cell_bytes)
            strides = (tensor.block_stride, tensor.head_stride, tensor.tile_stride, 1)
            return flat.as_strided(shape, strides, offset)
    raise ValueError(f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations")
