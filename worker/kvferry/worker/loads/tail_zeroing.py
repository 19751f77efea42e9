"""Zeroes the bytes of a load's last blocks that no token fills.

On a device, zeroing is one wave of the relayout, from a source of zeros. Its kernel runs on the relayout's own stream,
once everything that the load read is in place. The load is reported only after the kernel's mark, so the engine
launches work that reads the blocks only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.plan.blocks import RequestBlocks, UnitPairs
from kvferry.plan.tokens import TokenMap, TokenSide, slots_before
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import DeviceMark
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.shape import CopyAxis, Shape
from kvferry.worker.relayout.wave_table import Pieces, WaveTable
from kvferry.worker.staging.buffer import relayout_for

_WHOLE_BLOCK = 1 << 31
_GAPS_PER_GROUP = 2
"""One before the window, one after the last token."""


class Gap(NamedTuple):
    """Local slots `[first, stop)` of one kernel block that hold nothing of the request."""

    group: int
    block: int
    first: int
    stop: int


class _Tiles(NamedTuple):
    """The cells of tensors that share their block numbers: `tiles` of `tile_tokens` tokens in each block."""

    group: int
    tile_tokens: int
    tiles: int

    @classmethod
    def of(cls, tensor: PagedTensor) -> _Tiles:
        return cls(tensor.group, tensor.tile_tokens, tensor.tiles)

    def inside(self, gaps: Iterable[Gap]) -> Iterator[tuple[int, range]]:
        """The blocks of the gaps, each with its cells that lie in the gap as a whole."""
        for gap in gaps:
            cells = range(
                -(-gap.first // self.tile_tokens), min(gap.stop // self.tile_tokens, self.tiles)
            )
            if gap.group == self.group and cells:
                yield gap.block, cells


class TailZeroing:
    """Zeroes the parts of loaded blocks that the load did not write: after its last token, and before its window.

    A cell that holds several tokens is not divided: only cells with no loaded token at all are zeroed.

    Raises:
        ValueError: a tensor in host memory lies in none of the storages.
    """

    def __init__(self, caches: KvCaches) -> None:
        self._device = caches.device
        self._relayout: Relayout | None = None
        divisible = [tensor for tensor in caches.tensors if tensor.tiles > 1 and len(tensor.heads)]
        if caches.device.where.type == "cpu":
            self._cells: dict[_Tiles, list[NDArray[np.uint8]]] = {}
            for tensor in divisible:
                self._cells.setdefault(_Tiles.of(tensor), []).append(
                    _cells(tensor, caches.storages)
                )
            return
        run = max((_element_bytes(tensor) for tensor in divisible), default=1)
        self._zeros = caches.device.empty(run)
        self._zeros.zero_()
        kinds: dict[tuple[_Tiles, Shape], int] = {}
        rows = [
            (
                self._zeros.data_ptr(),
                tensor.base,
                kinds.setdefault((_Tiles.of(tensor), _shape(tensor)), len(kinds)),
                0,
            )
            for tensor in divisible
        ]
        self._tiles = [tiles for tiles, _ in kinds]
        self._pieces = Pieces(
            tuple(shape for _, shape in kinds), np.array(rows, dtype=np.int64).reshape(-1, 4)
        )
        groups = {tiles.group for tiles in self._tiles}
        largest = self._table(
            [Gap(group, 0, 0, _WHOLE_BLOCK) for group in groups] * _GAPS_PER_GROUP
        )
        self._relayout = relayout_for([self._zeros], caches.storages, caches.device, largest)

    def mark(self) -> DeviceMark:
        """A mark that is reached when everything that `zero` has launched so far is done."""
        return self._relayout.mark() if self._relayout is not None else self._device.mark()

    def zero(
        self,
        units: Mapping[TokenMap, UnitPairs],
        groups: Sequence[CacheGroup],
        request: RequestBlocks,
    ) -> DeviceMark | None:
        """Zero the gaps of a request in every tensor.

        Args:
            units: the loaded units.
            groups: this engine's cache groups.

        Returns:
            A mark that is reached when it is done; None when there is nothing to zero.
        """
        found = list(gaps(units, groups, request))
        if self._relayout is not None:
            table = self._table(found)
            return (
                (self._relayout.try_start(table) or _Waiting(self._relayout, table))
                if len(table.units)
                else None
            )
        is_any = False
        for tiles, memories in self._cells.items():
            for block, cells in tiles.inside(found):
                is_any = True
                for memory in memories:
                    # With numpy: torch would divide the work among its own threads, which then spin while they wait.
                    memory[block, :, cells.start : cells.stop] = 0
        return self.mark() if is_any else None

    def _table(self, gaps: Sequence[Gap]) -> WaveTable:
        """The table that copies zeros into the cells in the gaps: a unit is one cell, in all heads of a tensor."""
        ranges: list[tuple[int, int]] = []
        units: list[tuple[int, int, int, int]] = []
        for tiles in self._tiles:
            first = len(units)
            units += [(0, 0, block, cell) for block, cells in tiles.inside(gaps) for cell in cells]
            ranges.append((first, len(units)))
        return WaveTable(
            self._pieces, tuple(ranges), np.array(units, dtype=np.int32).reshape(-1, 4)
        )


def _element_bytes(tensor: PagedTensor) -> int:
    return tensor.element_bytes or tensor.cell_bytes


def _shape(tensor: PagedTensor) -> Shape:
    """One cell in all heads of a tensor, from zeros; its position in the block is its number."""
    elements = tensor.cell_bytes // _element_bytes(tensor)
    axes = [
        CopyAxis(len(tensor.heads), 0, tensor.head_stride),
        CopyAxis(elements, 0, tensor.element_stride),
    ]
    unit_stride = (tensor.block_stride, tensor.tile_stride)
    return Shape.from_axes(axes, _element_bytes(tensor), destination_unit_stride=unit_stride)


def _cells(tensor: PagedTensor, storages: Sequence[torch.Tensor]) -> NDArray[np.uint8]:
    """A tensor in host memory, uint8 `[blocks, heads, tiles, elements, element_bytes]`, sharing the caches' memory."""
    element_bytes = _element_bytes(tensor)
    counts = (
        tensor.blocks,
        len(tensor.heads),
        tensor.tiles,
        tensor.cell_bytes // element_bytes,
        element_bytes,
    )
    strides = (
        tensor.block_stride,
        tensor.head_stride,
        tensor.tile_stride,
        tensor.element_stride,
        1,
    )
    for storage in storages:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage.untyped_storage()).numpy()
        offset = tensor.base - whole.ctypes.data
        if 0 <= offset < len(whole):
            return np.ndarray(counts, dtype=np.uint8, buffer=whole, offset=offset, strides=strides)
    raise ValueError(f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations")


class _Waiting:
    """A table that waits for room on the device; `reached` starts it once there is room."""

    def __init__(self, relayout: Relayout, table: WaveTable) -> None:
        self._relayout = relayout
        self._table = table
        self._mark: DeviceMark | None = None

    def reached(self) -> bool:
        if self._mark is None:
            self._mark = self._relayout.try_start(self._table)
        return self._mark is not None and self._mark.reached()


def gaps(
    units: Mapping[TokenMap, UnitPairs], groups: Sequence[CacheGroup], request: RequestBlocks
) -> Iterator[Gap]:
    """The slots of loaded blocks that hold no token of the request.

    Slots before its first token are not among them: the load must not change them.
    """
    first_slots: dict[int, tuple[int, TokenMap]] = {}
    for tokens, pairs in units.items():
        if not tokens.is_state and len(pairs):
            found = first_slots.get(tokens.group)
            if found is None or pairs.first_slot < found[0]:
                first_slots[tokens.group] = (pairs.first_slot, tokens)
    for index, (start, tokens) in first_slots.items():
        side, group, ids = tokens.local, groups[index], request.local[index]
        stop = slots_before(side.share, request.stop_token)
        front = start - start % side.block_tokens
        begin = max(front, slots_before(side.share, request.first_token))
        if begin < start:
            yield Gap(index, _block_of(start, ids, group, side), begin - front, start - front)
        if stop > start and stop % side.block_tokens:
            yield Gap(
                index,
                _block_of(stop - 1, ids, group, side),
                stop % side.block_tokens,
                side.block_tokens,
            )


def _block_of(slot: int, ids: Sequence[int], group: CacheGroup, side: TokenSide) -> int:
    """The kernel block of a local slot of a request."""
    scheduler_block, inside = divmod(slot, group.block_tokens)
    return (
        ids[scheduler_block] * (group.block_tokens // side.block_tokens)
        + inside // side.block_tokens
    )
