"""Caches of an engine without a model: every byte of a cell follows from (seed, layer, head, tile, byte).

The cells are found by the definition of a paged tensor alone, so nothing here shares code with what is tested. Each
tensor has guard bytes on both sides, and each cache one value everywhere before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.memory.caches import KvCaches

Bytes = npt.NDArray[np.uint8]

CPU = torch.device("cpu")
GUARD_BYTES = 64
PATTERN = Format(dtype="uint8", packing="k|v")


@dataclass(frozen=True)
class CacheShape:
    """Geometry of a toy cache.

    Attributes:
        axes: the order in which `b`locks, `h`eads and `t`iles lie in memory, outermost first.
        gap_bytes: unused bytes after every row of the innermost axis.
        ratio: kernel blocks per scheduler block.
        one_storage: all layers lie in one allocation.
        format, scales: the described format and scales of a cell's bytes.
    """

    layers: int = 3
    heads: int = 2
    blocks: int = 48
    block_tokens: int = 4
    tile_tokens: int = 1
    cell_bytes: int = 16
    axes: str = "bht"
    gap_bytes: int = 0
    ratio: int = 1
    one_storage: bool = False
    format: Format = PATTERN
    scales: tuple[float, ...] = ()

    @property
    def tiles(self) -> int:
        return self.block_tokens // self.tile_tokens

    @property
    def group(self) -> CacheGroup:
        return CacheGroup(policy="full", block_tokens=self.block_tokens * self.ratio)

    @property
    def block_bytes(self) -> int:
        """Bytes that one kernel block moves, all layers together."""
        return self.layers * self.heads * self.tiles * self.cell_bytes

    def strides(self) -> tuple[dict[str, int], int]:
        """Strides by axis, and the bytes of a whole tensor."""
        sizes = {"b": self.blocks, "h": self.heads, "t": self.tiles}
        found, step = {}, self.cell_bytes
        for axis in reversed(self.axes):
            found[axis] = step
            step = step * sizes[axis] + self.gap_bytes
        return found, step


class ToyCaches:
    """The caches of one worker.

    Args:
        device: their described device; the memory is the host's (`tests.fakes.cuda`).

    Attributes:
        memory: uint8, one array per allocation, sharing it.
        kv: the same caches as they are passed to kvferry.
    """

    def __init__(self, shape: CacheShape, poison: int, device: torch.device = CPU) -> None:
        self.shape = shape
        strides, tensor_bytes = shape.strides()
        step = tensor_bytes + 2 * GUARD_BYTES
        sizes = [step * shape.layers] if shape.one_storage else [step] * shape.layers
        storages = [torch.full((size,), poison, dtype=torch.uint8) for size in sizes]
        self.memory: list[Bytes] = [storage.numpy() for storage in storages]
        self._where: list[tuple[int, int]] = []
        tensors = []
        for layer in range(shape.layers):
            storage, offset = (0, layer * step) if shape.one_storage else (layer, 0)
            self._where.append((storage, offset + GUARD_BYTES))
            tensors.append(
                PagedTensor(
                    layer=f"layers.{layer}",
                    kind="kv",
                    group=0,
                    base=storages[storage].data_ptr() + offset + GUARD_BYTES,
                    blocks=shape.blocks,
                    block_tokens=shape.block_tokens,
                    block_stride=strides["b"],
                    heads=Range(0, shape.heads),
                    head_stride=strides["h"],
                    tile_tokens=shape.tile_tokens,
                    tile_stride=strides["t"],
                    cell_bytes=shape.cell_bytes,
                    format=shape.format,
                    scales=shape.scales,
                )
            )
        self.kv = KvCaches(tuple(storages), tuple(tensors), device)

    def cells(self, layer: int, memory: Sequence[Bytes] | None = None) -> Bytes:
        """uint8 `[blocks, heads, tiles, cell_bytes]` of a layer, in these caches or in a copy of their memory."""
        storage, offset = self._where[layer]
        strides, _ = self.shape.strides()
        shape = self.shape
        cells: Bytes = np.lib.stride_tricks.as_strided(
            (self.memory if memory is None else memory)[storage][offset:],
            (shape.blocks, shape.heads, shape.tiles, shape.cell_bytes),
            (strides["b"], strides["h"], strides["t"], 1),
        )
        return cells

    def snapshot(self) -> list[Bytes]:
        """A copy of everything, guards included."""
        return [part.copy() for part in self.memory]

    def write(self, blocks: Sequence[int], tokens: int, seed: int) -> None:
        """Write the cells of the first `tokens` tokens of a request with these scheduler blocks, as a prefill does."""
        self.write_into(self.memory, blocks, 0, tokens, seed, tail=None)

    def fill(self, blocks: Sequence[int], value: int) -> None:
        """Overwrite whole blocks, as the next request that gets them would."""
        for layer in range(self.shape.layers):
            self.cells(layer)[self.kernel_blocks(blocks)] = value

    def write_into(
        self, memory: Sequence[Bytes], blocks: Sequence[int], first: int, stop: int, seed: int, tail: int | None
    ) -> None:
        """Write the kernel blocks that hold tokens [first, stop) as they are when the request is complete there.

        Args:
            tail: what the cells after the last token become; None leaves them.
        """
        shape = self.shape
        kernel = self.kernel_blocks(blocks)
        for index in range(first // shape.block_tokens, -(-stop // shape.block_tokens)):
            used = -(-(min(stop, (index + 1) * shape.block_tokens) - index * shape.block_tokens) // shape.tile_tokens)
            tiles = np.arange(used) + index * shape.tiles
            for layer in range(shape.layers):
                cells = self.cells(layer, memory)[kernel[index]]
                for head in range(shape.heads):
                    cells[head, :used] = pattern(seed, layer, head, tiles, shape.cell_bytes)
                    if tail is not None:
                        cells[head, used:] = tail

    def kernel_blocks(self, blocks: Sequence[int]) -> list[int]:
        """The kernel blocks of scheduler blocks."""
        return [block * self.shape.ratio + part for block in blocks for part in range(self.shape.ratio)]


def pattern(seed: int, layer: int, head: int, tiles: npt.NDArray[np.int64], cell_bytes: int) -> Bytes:
    """uint8 `[tiles, cell_bytes]`: the bytes of a request's cells; no two of its cells are equal."""
    position = np.array([[seed, layer, head, 0, 0]], dtype=np.uint64)
    mixed = (position * np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0, 0], np.uint64)).sum()
    token = tiles.astype(np.uint64)[:, None] * np.array([0xD6E8FEB86659FD93], np.uint64)
    byte = np.arange(cell_bytes, dtype=np.uint64)[None, :] * np.array([0xA0761D6478BD642F], np.uint64)
    word = token + byte + mixed
    word ^= word >> np.uint64(29)
    word *= np.array([0xBF58476D1CE4E5B9], np.uint64)
    found: Bytes = (word >> np.uint64(56)).astype(np.uint8)
    return found
