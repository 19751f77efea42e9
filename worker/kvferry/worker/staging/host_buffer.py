"""A copy of the caches in host memory, for fabrics that do not reach the device.

The copy has the layout of the caches at other addresses, and is as large as they are. A request's blocks are copied
when it is held, by relayouts of bounded size; its lease becomes READY only when the last has finished. So peers never
read from the device. Only engines that others read from have a copy.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
"""Bytes of one relayout, at most, unless one block has more: this bounds the rows of a table, which has limited room.
"""


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
        memory: list[HostMemory] = []
        moved: dict[int, _MovedAllocation] = {}
        # Pinned pages outlive a start that fails: all of them are unpinned unless all of this works.
        with contextlib.ExitStack() as undo:
            # In vLLM, layers share allocations: each is copied once.
            for tensor in caches.storages:
                allocation = tensor.untyped_storage()
                start = allocation.data_ptr()
                if start in moved:
                    continue
                copy = HostMemory(allocation.nbytes(), caches.device)
                undo.callback(copy.unpin)
                memory.append(copy)
                shift = copy.tensor.data_ptr() - start
                moved[start] = _MovedAllocation(
                    start, start + allocation.nbytes(), shift
                )
            self.memory = tuple(memory)
            storages = [copy.tensor for copy in memory]
            self._pairs = [
                (tensor, _moved(tensor, moved.values())) for tensor in caches.tensors
            ]
            self.caches = KvCaches(
                tuple(storages), tuple(copy for _, copy in self._pairs), HOST
            )
            self._relayout = relayout_for(caches.storages, storages, caches.device)
            undo.pop_all()
        self._last_copy: DeviceMark | None = None
        kinds: dict[tuple[Shape, _BlockNumbering], int] = {}
        rows: list[tuple[int, int, int, int]] = []
        for original, tensor_copy in self._pairs:
            kind = (_shape(original), _BlockNumbering.from_tensor(original))
            number = kinds.setdefault(kind, len(kinds))
            rows.append((original.base, tensor_copy.base, number, 0))
        self._numberings = [numbering for _, numbering in kinds]
        self._pieces = Pieces(
            tuple(shape for shape, _ in kinds),
            np.array(rows, dtype=np.int64).reshape(-1, 4),
        )

    def waves(self, blocks: Blocks) -> deque[Blocks]:
        """A request's scheduler blocks, per cache group, in portions to be copied one by one; at least one portion."""
        block_bytes = [self._block_bytes(group) for group in range(len(self._groups))]
        total_bytes = sum(
            len(ids) * size for ids, size in zip(blocks, block_bytes, strict=True)
        )
        # Most requests are one launch, and the one without blocks is one too: it needs a mark.
        if total_bytes <= WAVE_BYTES:
            return deque([blocks])
        return deque(self._portions(blocks, block_bytes))

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
            self._last_copy = mark
        # The last wave's mark stands for all: waves are copied in order.
        return mark

    @property
    def is_copying(self) -> bool:
        """Whether the device may still read the caches."""
        return self._last_copy is not None and not self._last_copy.reached()

    def _block_bytes(self, group: int) -> int:
        """Bytes of one scheduler block of a group, in all of its tensors."""
        own = [tensor for tensor, _ in self._pairs if tensor.group == group]
        return sum(
            tensor.block_bytes * self._ratio(_BlockNumbering.from_tensor(tensor))
            for tensor in own
        )

    @staticmethod
    def _portions(blocks: Blocks, block_bytes: Sequence[int]) -> Iterator[Blocks]:
        """Portions of at most `WAVE_BYTES`, each of blocks of one group."""
        empty: tuple[int, ...] = ()
        for group, (ids, size) in enumerate(zip(blocks, block_bytes, strict=True)):
            count = max(1, WAVE_BYTES // max(1, size))
            for start in range(0, len(ids), count):
                portion = [empty] * len(blocks)
                portion[group] = ids[start : start + count]
                yield tuple(portion)

    def _table(self, blocks: Blocks) -> WaveTable:
        ranges: dict[_BlockNumbering, tuple[int, int]] = {}
        units = [np.empty((0, 4), dtype=np.int32)]
        count = 0
        for numbering in dict.fromkeys(self._numberings):
            ids = self._kernel_blocks(numbering, blocks)
            ranges[numbering] = (count, count + len(ids))
            count += len(ids)
            # A unit is a whole block, at the same number on both sides.
            units.append(np.stack([ids, np.zeros_like(ids)] * 2, axis=1))
        return WaveTable(
            self._pieces,
            ranges=tuple(ranges[numbering] for numbering in self._numberings),
            units=np.concatenate(units),
        )

    def _kernel_blocks(self, numbering: _BlockNumbering, blocks: Blocks) -> np.ndarray:
        ratio = self._ratio(numbering)
        ids = [block for block in blocks[numbering.group] if block != NULL_BLOCK]
        first_kernel_blocks = np.array(ids, dtype=np.int64)[:, None] * ratio
        return np.asarray(
            (first_kernel_blocks + np.arange(ratio)).ravel().astype(np.int32)
        )

    def _ratio(self, numbering: _BlockNumbering) -> int:
        """Kernel blocks of a scheduler block."""
        group = self._groups[numbering.group]
        # A state's block is one state, however many tokens vLLM counts for it.
        if group.policy == "state":
            return 1
        return group.block_tokens // numbering.block_tokens


class _BlockNumbering(NamedTuple):
    """The group and kernel block size of tensors: those that share them also share their block numbers."""

    group: int
    block_tokens: int

    @classmethod
    def from_tensor(cls, tensor: PagedTensor) -> _BlockNumbering:
        return cls(tensor.group, tensor.block_tokens)


class _MovedAllocation(NamedTuple):
    """An allocation `[start, stop)` of the caches, and how far from it its copy lies."""

    start: int
    stop: int
    shift: int


def _moved(tensor: PagedTensor, moved: Iterable[_MovedAllocation]) -> PagedTensor:
    """The tensor at the address of its copy."""
    for allocation in moved:
        if allocation.start <= tensor.base < allocation.stop:
            return msgspec.structs.replace(tensor, base=tensor.base + allocation.shift)
    raise ValueError(
        f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations"
    )


def _shape(tensor: PagedTensor) -> Shape:
    """One block of a tensor, the same on both sides."""
    # Without a size of elements, a cell's bytes are contiguous.
    element = tensor.element_bytes or tensor.cell_bytes
    axes = [
        CopyAxis(len(tensor.heads), tensor.head_stride, tensor.head_stride),
        CopyAxis(tensor.tiles, tensor.tile_stride, tensor.tile_stride),
        CopyAxis(
            tensor.cell_bytes // element, tensor.element_stride, tensor.element_stride
        ),
    ]
    unit_stride = (tensor.block_stride, 0)
    return Shape.from_axes(
        axes,
        element,
        source_unit_stride=unit_stride,
        destination_unit_stride=unit_stride,
    )
