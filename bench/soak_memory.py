"""The caches of one soaked worker: what a prompt's cells hold follows from its seed, free blocks hold one value, and
everything that is no cell of any block holds another for ever.

Cells are found by the definition of a paged tensor alone, so nothing here shares code with what is soaked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.protocol.geometry import PagedTensor
from kvferry.worker.memory.caches import KvCaches
from tests.geometry.caches import Caches

Bytes = npt.NDArray[np.uint8]

FREE = 0xC3
GUARD = 0x3C

_MIX = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F], np.uint64
)


class SoakMemory:
    """One worker's allocations.

    Args:
        caches: of one cache group, one token a cell.

    Attributes:
        kv: the same as kvferry gets it.
    """

    def __init__(self, caches: Caches) -> None:
        storages = [torch.full((size,), GUARD, dtype=torch.uint8) for size in caches.sizes]
        tensors = caches.at([storage.data_ptr() for storage in storages])
        self.kv = KvCaches(tuple(storages), tensors, torch.device("cpu"))
        self._parts: list[Bytes] = [storage.numpy() for storage in storages]
        self._views: list[tuple[PagedTensor, Bytes]] = []
        for (storage, _), tensor in zip(caches.tensors, tensors, strict=True):
            view = _cells(self._parts[storage], tensor.base - storages[storage].data_ptr(), tensor)
            view[:] = FREE
            self._views.append((tensor, view))
        self._guards = [part == GUARD for part in self._parts]

    def write(self, blocks: Sequence[int], tokens: int, seed: int) -> None:
        """Write a prefill's bytes into a prompt's blocks, from its first token on."""
        for view, ids, used, values in self._pieces(blocks, tokens, seed):
            view[ids, :, :used] = values

    def fill(self, blocks: Sequence[int], value: int = FREE) -> None:
        """Whole blocks."""
        for _, view in self._views:
            view[list(blocks)] = value

    def holds(self, blocks: Sequence[int], value: int = FREE) -> bool:
        """Whether every byte of the blocks is this one."""
        return all(bool((view[list(blocks)] == value).all()) for _, view in self._views)

    def wrong_bytes(self, blocks: Sequence[int], tokens: int, seed: int) -> int:
        """Bytes of a prompt's blocks that are not what they must be, those behind its last token, zero, included."""
        wrong = 0
        for view, ids, used, values in self._pieces(blocks, tokens, seed):
            wrong += int((view[ids, :, :used] != values).sum())
            wrong += int((view[ids, :, used:] != 0).sum())
        return wrong

    def broken_guards(self) -> int:
        """Bytes that belong to no block and have changed."""
        return sum(int((part[guard] != GUARD).sum()) for part, guard in zip(self._parts, self._guards, strict=True))

    def _pieces(self, blocks: Sequence[int], tokens: int, seed: int) -> Iterator[tuple[Bytes, list[int], int, Bytes]]:
        """Per tensor its full blocks, then its last one: the view, block ids, tokens in each, and their bytes."""
        for tensor, view in self._views:
            full, rest = divmod(tokens, tensor.block_tokens)
            values = _values(tensor, tokens, seed)
            if full:
                shape = (len(tensor.heads), full, tensor.block_tokens, *values.shape[2:])
                cut = values[:, : full * tensor.block_tokens].reshape(shape)
                yield view, list(blocks[:full]), tensor.block_tokens, cut.swapaxes(0, 1)
            if rest:
                yield view, [blocks[full]], rest, values[None, :, full * tensor.block_tokens :]


def _values(tensor: PagedTensor, tokens: int, seed: int) -> Bytes:
    """uint8 `[heads, tokens, elements, element_bytes]`: they follow from seed, layer, kind, global head and token."""
    layer = int(tensor.layer.rpartition(".")[2])
    name = (np.array([seed, 2 * layer + (tensor.kind == "v")], np.uint64) * _MIX[:2]).sum()
    heads = np.arange(tensor.heads.start, tensor.heads.stop, dtype=np.uint64)[:, None, None] * _MIX[2]
    token = np.arange(tokens, dtype=np.uint64)[None, :, None] * _MIX[3]
    word = heads + token + name + np.arange(tensor.cell_bytes, dtype=np.uint64) * _MIX[4]
    word ^= word >> np.uint64(29)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    element = tensor.element_bytes or tensor.cell_bytes
    found: Bytes = (word >> np.uint64(56)).astype(np.uint8)
    shape = (len(heads), tokens, tensor.cell_bytes // element, element)
    return np.reshape(found, shape)


def _cells(part: Bytes, offset: int, tensor: PagedTensor) -> Bytes:
    """uint8 `[blocks, heads, tokens of a block, elements, element_bytes]` of one tensor."""
    element = tensor.element_bytes or tensor.cell_bytes
    shape = (tensor.blocks, len(tensor.heads), tensor.tiles, tensor.cell_bytes // element, element)
    steps = (tensor.block_stride, tensor.head_stride, tensor.tile_stride, tensor.element_stride or element, 1)
    view: Bytes = np.lib.stride_tricks.as_strided(part[offset:], shape, steps)
    return view
