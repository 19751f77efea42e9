"""Caches of one worker and one cache group, in which every byte of a request follows from (seed, tensor, head, tile).

The cells are found by the definition of a paged tensor alone, so nothing here shares code with what is tested. Blocks
have one value everywhere before anything is written, and so has everything that is no cell of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.protocol.geometry import Format, PagedTensor, Range
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import HOST, Device
from kvferry.worker.peer_memory.shared_file import SharedFile
from tests.fakes.cuda_memory import FakeDevice
from tests.harness.sleeping_memory import SleepingMemory

Bytes = npt.NDArray[np.uint8]

GUARD_BYTES = 64
PATTERN = Format(dtype="uint8", packing="k|v")

_MIX = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
    ],
    np.uint64,
)


class PatternCaches:
    """The allocations of one worker and the paged tensors in them.

    Args:
        poison, guard: the first value of the bytes of all blocks, and of those of none; the same by default.
        ratio: kernel blocks per scheduler block.
        device: their described device; the memory is the host's (`tests.fakes.cuda`).
        shared: the files that the storages lie in, if consumers of this host may map them.

    Attributes:
        memory: uint8, one array per allocation, sharing it.
        kv: the same caches as they are passed to kvferry.
    """

    def __init__(
        self,
        storages: Sequence[torch.Tensor],
        tensors: Sequence[PagedTensor],
        poison: int,
        *,
        guard: int | None = None,
        ratio: int = 1,
        device: Device = HOST,
        shared: Sequence[SharedFile] = (),
    ) -> None:
        self.kv = KvCaches(tuple(storages), tuple(tensors), device, tuple(shared))
        if isinstance(device, FakeDevice):
            device.own(storages)
        self.memory: list[Bytes] = [storage.numpy() for storage in storages]
        self._ratio = ratio
        self._guard = poison if guard is None else guard
        for part in self.memory:
            part[:] = self._guard
        self._fill_cells(self.memory, poison)

    def cells(self, layer: int, memory: Sequence[Bytes] | None = None) -> Bytes:
        """uint8 `[blocks, heads, tiles, cell_bytes]` of a tensor whose cells are whole, here or in a copy."""
        view = self._view(
            self.kv.tensors[layer], self.memory if memory is None else memory
        )
        assert view.shape[3] == 1
        return view[:, :, :, 0]

    def snapshot(self) -> list[Bytes]:
        """A copy of everything, guards included."""
        return [part.copy() for part in self.memory]

    def write(self, blocks: Sequence[int], tokens: int, seed: int) -> None:
        """Write the cells of the first `tokens` tokens of a request with these scheduler blocks, as a prefill does."""
        self.write_into(self.memory, blocks, 0, tokens, seed, tail=None)

    def fill(self, blocks: Iterable[int], value: int) -> None:
        """Overwrite whole blocks, as the next request that gets them would."""
        for tensor in self.kv.tensors:
            self._view(tensor, self.memory)[self.kernel_blocks(blocks)] = value

    def holds(self, blocks: Sequence[int], value: int) -> bool:
        """Whether every byte of the blocks has this value."""
        own = self.kernel_blocks(blocks)
        return all(
            bool((self._view(tensor, self.memory)[own] == value).all())
            for tensor in self.kv.tensors
        )

    def write_into(
        self,
        memory: Sequence[Bytes],
        blocks: Sequence[int],
        first: int,
        stop: int,
        seed: int,
        tail: int | None,
    ) -> None:
        """Write the kernel blocks that hold tokens [first, stop) as they are when the request is complete there.

        Args:
            tail: what the cells after the last token become; None leaves them.
        """
        for view, ids, values in self._pieces(memory, blocks, first, stop, seed):
            used = values.shape[2]
            view[ids, :, :used] = values
            if tail is not None:
                view[ids, :, used:] = tail

    def wrong_bytes(self, blocks: Sequence[int], tokens: int, seed: int) -> int:
        """Bytes of a request's blocks that are not what they must be, those behind its last token, zero, included."""
        wrong = 0
        for view, ids, values in self._pieces(self.memory, blocks, 0, tokens, seed):
            used = values.shape[2]
            wrong += int((view[ids, :, :used] != values).sum()) + int(
                (view[ids, :, used:] != 0).sum()
            )
        return wrong

    def broken_guards(self) -> int:
        """Bytes that belong to no block and have changed."""
        cells = [np.zeros_like(part) for part in self.memory]
        self._fill_cells(cells, 1)
        return sum(
            int((part[mask == 0] != self._guard).sum())
            for part, mask in zip(self.memory, cells, strict=True)
        )

    def kernel_blocks(self, blocks: Iterable[int]) -> list[int]:
        """The kernel blocks of scheduler blocks."""
        return [
            block * self._ratio + part
            for block in blocks
            for part in range(self._ratio)
        ]

    def _pieces(
        self,
        memory: Sequence[Bytes],
        blocks: Sequence[int],
        first: int,
        stop: int,
        seed: int,
    ) -> Iterator[tuple[Bytes, list[int], Bytes]]:
        """Per tensor its full blocks that hold tokens [first, stop), then the last one: the view, kernel block ids, and
        the values of their first tiles, `[ids, heads, tiles, elements, element_bytes]`."""
        kernel = self.kernel_blocks(blocks)
        for tensor in self.kv.tensors:
            view, begin = self._view(tensor, memory), first // tensor.block_tokens
            tiles = np.arange(begin * tensor.tiles, -(-stop // tensor.tile_tokens))
            full, rest = divmod(len(tiles), tensor.tiles)
            values = _values(tensor, tiles, seed)
            cut = full * tensor.tiles
            if full:
                whole = values[:, :cut].reshape(
                    len(values), full, tensor.tiles, *values.shape[2:]
                )
                yield view, kernel[begin : begin + full], whole.swapaxes(0, 1)
            if rest:
                yield view, [kernel[begin + full]], values[None, :, cut:]

    def _fill_cells(self, memory: Sequence[Bytes], value: int) -> None:
        for tensor in self.kv.tensors:
            self._view(tensor, memory)[:] = value

    def _view(self, tensor: PagedTensor, memory: Sequence[Bytes]) -> Bytes:
        """uint8 `[blocks, heads, tiles, elements, element_bytes]` of one tensor."""
        starts = [tensor.base - part.ctypes.data for part in self.memory]
        index = next(
            i for i, part in enumerate(self.memory) if 0 <= starts[i] < part.nbytes
        )
        element = tensor.element_bytes or tensor.cell_bytes
        shape = (
            tensor.blocks,
            len(tensor.heads),
            tensor.tiles,
            tensor.cell_bytes // element,
            element,
        )
        steps = (
            tensor.block_stride,
            tensor.head_stride,
            tensor.tile_stride,
            tensor.element_stride or element,
            1,
        )
        view: Bytes = np.lib.stride_tricks.as_strided(
            memory[index][starts[index] :], shape, steps
        )
        return view


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


class ToyCaches(PatternCaches):
    """Caches of a toy shape, each tensor with guard bytes on both sides.

    Args:
        pages: where the storages are allocated, if they can be taken away.
    """

    def __init__(
        self,
        shape: CacheShape,
        poison: int,
        device: Device = HOST,
        *,
        shared: bool = False,
        pages: SleepingMemory | None = None,
    ) -> None:
        self.shape = shape
        strides, tensor_bytes = shape.strides()
        step = tensor_bytes + 2 * GUARD_BYTES
        sizes = [step * shape.layers] if shape.one_storage else [step] * shape.layers
        files = [SharedFile(size) for size in sizes] if shared else []
        if pages is not None:
            for file in files:
                pages.share(file)
        if pages is not None and not shared:
            storages = [pages.empty(size) for size in sizes]
        else:
            storages = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if shared:
            storages = [
                file.tensor[:size] for file, size in zip(files, sizes, strict=True)
            ]
        bases = [
            storages[0].data_ptr() + layer * step
            if shape.one_storage
            else storages[layer].data_ptr()
            for layer in range(shape.layers)
        ]
        tensors = [
            PagedTensor(
                layer=f"layers.{layer}",
                kind="kv",
                group=0,
                base=base + GUARD_BYTES,
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
            for layer, base in enumerate(bases)
        ]
        super().__init__(
            storages, tensors, poison, ratio=shape.ratio, device=device, shared=files
        )


def _values(tensor: PagedTensor, tiles: npt.NDArray[np.int64], seed: int) -> Bytes:
    """uint8 `[heads, tiles, elements, element_bytes]` of a request's cells, of which no two are equal: they follow from
    seed, layer, kind, head in the model, and tile of the request."""
    layer = int(tensor.layer.rpartition(".")[2])
    name = (
        np.array([seed, 2 * layer + (tensor.kind == "v")], np.uint64) * _MIX[:2]
    ).sum()
    heads = (
        np.arange(tensor.heads.start, tensor.heads.stop, dtype=np.uint64)[:, None, None]
        * _MIX[2]
    )
    tile = tiles.astype(np.uint64)[None, :, None] * _MIX[3]
    word = heads + tile + name + np.arange(tensor.cell_bytes, dtype=np.uint64) * _MIX[4]
    word ^= word >> np.uint64(29)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    element = tensor.element_bytes or tensor.cell_bytes
    found: Bytes = (word >> np.uint64(56)).astype(np.uint8)
    return found.reshape(len(heads), len(tiles), tensor.cell_bytes // element, element)
