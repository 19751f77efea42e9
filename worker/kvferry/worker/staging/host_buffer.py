"""A copy of the caches in host memory, for fabrics that do not reach the device.

The copy has the layout of the caches at other addresses. A request's blocks are copied when it is held, by relayouts
of bounded size; its lease becomes READY only when the last has finished. So peers never read from the device. The copy
is as large as the caches, and only a producer has one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.plan.blocks import NULL_BLOCK
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup
from kvferry.protocol.params import Blocks
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import HOST, DeviceMark, HostMemory
from kvferry.worker.relayout.shape import CopyAxis, Shape
from kvferry.worker.relayout.wave_table import Pieces, WaveTable
from kvferry.worker.staging.buffer import relayout_for

WAVE_BYTES = 128 << 20
"""Most bytes of one relayout, unless one block has more: it bounds the rows of a table, which has limited room."""


class HostMirror:
    """The copy. Used on the transfer thread, once made.

    Args:
        caches: the caches to copy.
        groups: this engine's cache groups.

    Attributes:
        caches: the same caches, described in host memory.
        memory: of the copy, to be unpinned at the end.

    Raises:
        InvalidConfig: there is too little host memory.
    """

    def __init__(self, caches: KvCaches, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        memory, moved = [], {}
        with contextlib.ExitStack() as undo:
            for tensor in caches.storages:
                whole = tensor.untyped_storage()
                if whole.data_ptr() not in moved:
                    memory.append(HostMemory(whole.nbytes(), caches.device))
                    undo.callback(memory[-1].unpin)
                    moved[whole.data_ptr()] = (
                        whole.nbytes(),
                        memory[-1].tensor.data_ptr() - whole.data_ptr(),
                    )
            self.memory = tuple(memory)
            storages = [one.tensor for one in memory]
            self._pairs = [(tensor, _moved(tensor, moved)) for tensor in caches.tensors]
            self.caches = KvCaches(tuple(storages), tuple(copy for _, copy in self._pairs), HOST)
            self._relayout = relayout_for(caches.storages, storages, caches.device)
            undo.pop_all()
        kinds: dict[tuple[Shape, _Kernel], int] = {}
        rows = [
            (
                tensor.base,
                copy.base,
                kinds.setdefault((_shape(tensor), _Kernel.of(tensor)), len(kinds)),
                0,
            )
            for tensor, copy in self._pairs
        ]
        self._kernels = [kernel for _, kernel in kinds]
        self._pieces = Pieces(
            tuple(shape for shape, _ in kinds), np.array(rows, dtype=np.int64).reshape(-1, 4)
        )

    def waves(self, blocks: Blocks) -> deque[Blocks]:
        """A request's scheduler blocks, per cache group, in portions to be copied one by one; at least one portion."""
        sizes = [self._block_bytes(group) for group in range(len(self._groups))]
        if sum(len(ids) * size for ids, size in zip(blocks, sizes, strict=True)) <= WAVE_BYTES:
            return deque([blocks])
        return deque(self._portions(blocks, sizes))

    def try_copy(self, waves: deque[Blocks]) -> DeviceMark | None:
        """Begin to copy a request's waves, and remove those that have begun; never waits.

        Returns:
            A mark that is reached when the copy is complete; None while too many copies are under way: call again.
        """
        mark = None
        while waves:
            mark = self._relayout.try_start(self._table(waves[0]))
            if mark is None:
                return None
            waves.popleft()
        return mark  # of the last wave: waves are copied in order

    def _block_bytes(self, group: int) -> int:
        """Bytes of one scheduler block of a group, in all of its tensors."""
        own = [tensor for tensor, _ in self._pairs if tensor.group == group]
        return sum(tensor.block_bytes * self._ratio(_Kernel.of(tensor)) for tensor in own)

    @staticmethod
    def _portions(blocks: Blocks, sizes: Sequence[int]) -> Iterator[Blocks]:
        for group, (ids, size) in enumerate(zip(blocks, sizes, strict=True)):
            count = max(1, WAVE_BYTES // max(1, size))
            for first in range(0, len(ids), count):
                yield tuple(
                    ids[first : first + count] if other == group else ()
                    for other in range(len(blocks))
                )

    def _table(self, blocks: Blocks) -> WaveTable:
        ranges: dict[_Kernel, tuple[int, int]] = {}
        units = [np.empty((0, 4), dtype=np.int32)]
        count = 0
        for kernel in dict.fromkeys(self._kernels):
            ids = self._kernel_blocks(kernel, blocks)
            ranges[kernel] = (count, count + len(ids))
            count += len(ids)
            units.append(np.stack([ids, np.zeros_like(ids)] * 2, axis=1))
        return WaveTable(
            self._pieces, tuple(ranges[kernel] for kernel in self._kernels), np.concatenate(units)
        )

    def _kernel_blocks(self, kernel: _Kernel, blocks: Blocks) -> np.ndarray:
        ratio = self._ratio(kernel)
        ids = np.array(
            [block for block in blocks[kernel.group] if block != NULL_BLOCK], dtype=np.int64
        )
        return np.asarray((ids[:, None] * ratio + np.arange(ratio)).ravel().astype(np.int32))

    def _ratio(self, kernel: _Kernel) -> int:
        """Kernel blocks of a scheduler block."""
        group = self._groups[kernel.group]
        return 1 if group.policy == "state" else group.block_tokens // kernel.block_tokens


class _Kernel(NamedTuple):
    """The group and kernel block size of tensors: those that share them also share their block numbers."""

    group: int
    block_tokens: int

    @classmethod
    def of(cls, tensor: PagedTensor) -> _Kernel:
        return cls(tensor.group, tensor.block_tokens)


def _moved(tensor: PagedTensor, moved: dict[int, tuple[int, int]]) -> PagedTensor:
    """The tensor at the address of its copy."""
    for start, (num_bytes, shift) in moved.items():
        if start <= tensor.base < start + num_bytes:
            return msgspec.structs.replace(tensor, base=tensor.base + shift)
    raise ValueError(f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations")


def _shape(tensor: PagedTensor) -> Shape:
    """One block of a tensor, the same on both sides."""
    element = tensor.element_bytes or tensor.cell_bytes
    axes = [
        CopyAxis(len(tensor.heads), tensor.head_stride, tensor.head_stride),
        CopyAxis(tensor.tiles, tensor.tile_stride, tensor.tile_stride),
        CopyAxis(tensor.cell_bytes // element, tensor.element_stride, tensor.element_stride),
    ]
    unit_stride = (tensor.block_stride, 0)
    return Shape.of(
        axes, element, source_unit_stride=unit_stride, destination_unit_stride=unit_stride
    )
