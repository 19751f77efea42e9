"""Zeroes the slots of loaded blocks that hold no token of the request, its *gaps*.

    block 7                              block 9
    ├────────────┬───────────────────┬───┴───────────┬───────────────┤
    │ before the │      loaded       │    loaded     │ after the     │
    │ window     │                   │               │ last token    │
    └────────────┴───────────────────┴───────────────┴───────────────┘
      a gap, from the request's                        a gap
      first token on

Which slots these are is pure: tokens and blocks in, slots out (`gaps`).

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

from kvferry.plan.blocks import RequestBlocks, UnitPairs, slots_before
from kvferry.plan.tokens import TokenMap, TokenSide
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.device import DeviceMark
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.shape import CopyAxis, Shape
from kvferry.worker.relayout.wave_table import Pieces, WaveTable
from kvferry.worker.staging.buffer import relayout_for

GAPS_PER_GROUP = 2
"""One before the window, one after the last token."""

_WHOLE_BLOCK = 1 << 31


class Gap(NamedTuple):
    """Local slots `[first, stop)` of one kernel block that hold nothing of the request."""

    group: int
    block: int
    first: int
    stop: int


def gaps(
    units: Mapping[TokenMap, UnitPairs],
    groups: Sequence[CacheGroup],
    request: RequestBlocks,
) -> Iterator[Gap]:
    """The slots of loaded blocks that hold no token of the request.

    Slots before its first token are not among them: the load must not change them.

    Args:
        units: the loaded units.
        groups: this engine's cache groups.
    """
    # By cache group the first local slot that is loaded, and how its tokens are mapped.
    first_slots: dict[int, tuple[int, TokenMap]] = {}
    for tokens, pairs in units.items():
        first_slot = pairs.first_slot
        if first_slot is None:
            continue
        known = first_slots.get(tokens.group)
        if known is None or first_slot < known[0]:
            first_slots[tokens.group] = (first_slot, tokens)
    for group_index, (start, tokens) in first_slots.items():
        side = tokens.local
        group = groups[group_index]
        ids = request.local[group_index]
        stop = slots_before(side.share, request.stop_token)
        block_begins = start - start % side.block_tokens
        begin = max(block_begins, slots_before(side.share, request.first_token))
        if begin < start:
            block = _kernel_block(start, ids, group, side)
            yield Gap(group_index, block, begin - block_begins, start - block_begins)
        stop_in_block = stop % side.block_tokens
        if stop > start and stop_in_block:
            block = _kernel_block(stop - 1, ids, group, side)
            yield Gap(group_index, block, stop_in_block, side.block_tokens)


def _kernel_block(
    slot: int, ids: Sequence[int], group: CacheGroup, side: TokenSide
) -> int:
    """The kernel block of a local slot of a request. A scheduler's block is several of them."""
    scheduler_block, slot_in_block = divmod(slot, group.block_tokens)
    kernel_blocks = group.block_tokens // side.block_tokens
    return ids[scheduler_block] * kernel_blocks + slot_in_block // side.block_tokens


class _Tiles(NamedTuple):
    """The cells of tensors that share their block numbers: `tiles` of `tile_tokens` tokens in each block."""

    group: int
    tile_tokens: int
    tiles: int

    @classmethod
    def of_tensor(cls, tensor: PagedTensor) -> _Tiles:
        return cls(tensor.group, tensor.tile_tokens, tensor.tiles)

    def inside(self, unfilled: Iterable[Gap]) -> Iterator[tuple[int, range]]:
        """The blocks of the gaps, each with its cells that lie in the gap as a whole."""
        for gap in unfilled:
            if gap.group != self.group:
                continue
            first = -(-gap.first // self.tile_tokens)
            stop = min(gap.stop // self.tile_tokens, self.tiles)
            if first < stop:
                yield gap.block, range(first, stop)


class TailZeroing:
    """Zeroes the parts of loaded blocks that the load did not write: after its last token, and before its window.

    A cell that holds several tokens is not divided: only cells with no loaded token at all are zeroed.

    Raises:
        ValueError: a tensor in host memory lies in none of the storages.
    """

    def __init__(self, caches: KvCaches) -> None:
        self._device = caches.device
        self._relayout: Relayout | None = None
        divisible = [
            tensor
            for tensor in caches.tensors
            if tensor.tiles > 1 and len(tensor.heads)
        ]
        if caches.device.where.type == "cpu":
            self._cells: dict[_Tiles, list[NDArray[np.uint8]]] = {}
            for tensor in divisible:
                cells = _cells(tensor, caches.storages)
                self._cells.setdefault(_Tiles.of_tensor(tensor), []).append(cells)
            return
        # Made here, not when it is first needed: memory of the device may be made only at registration.
        longest_run = max((_element_bytes(tensor) for tensor in divisible), default=1)
        self._zeros = caches.device.empty(longest_run)
        self._zeros.zero_()
        self._tiles, self._pieces = self._divide(divisible)
        groups = {tiles.group for tiles in self._tiles}
        whole_blocks = [Gap(group, 0, 0, _WHOLE_BLOCK) for group in groups]
        largest = self._table(whole_blocks * GAPS_PER_GROUP)
        self._relayout = relayout_for(
            [self._zeros], caches.storages, caches.device, largest
        )

    def mark(self) -> DeviceMark:
        """A mark that is reached when everything that `zero` has launched so far is done."""
        if self._relayout is None:
            return self._device.mark()
        return self._relayout.mark()

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
            A mark that is reached when it is done; None when it is done already, or there is nothing to zero.
        """
        unfilled = list(gaps(units, groups, request))
        if self._relayout is not None:
            return self._zero_on_device(self._relayout, unfilled)
        for tiles, memories in self._cells.items():
            for block, cells in tiles.inside(unfilled):
                for memory in memories:
                    # With numpy: torch would divide the work among its own threads, which then spin while they wait.
                    memory[block, :, cells.start : cells.stop] = 0
        return None

    def _zero_on_device(
        self, relayout: Relayout, unfilled: Sequence[Gap]
    ) -> DeviceMark | None:
        table = self._table(unfilled)
        if not len(table.units):
            return None
        mark = relayout.try_start(table)
        if mark is None:
            return _WaitingTable(relayout, table)
        return mark

    def _divide(self, tensors: Sequence[PagedTensor]) -> tuple[list[_Tiles], Pieces]:
        """The pieces of the relayout: a row for each tensor, and a kind for each set of cells and shape that differ."""
        kinds: dict[tuple[_Tiles, Shape], int] = {}
        rows: list[tuple[int, int, int, int]] = []
        for tensor in tensors:
            kind = kinds.setdefault(
                (_Tiles.of_tensor(tensor), _shape(tensor)), len(kinds)
            )
            rows.append((self._zeros.data_ptr(), tensor.base, kind, 0))
        tiles = [tiles for tiles, _ in kinds]
        shapes = tuple(shape for _, shape in kinds)
        return tiles, Pieces(shapes, np.array(rows, dtype=np.int64).reshape(-1, 4))

    def _table(self, unfilled: Sequence[Gap]) -> WaveTable:
        """The table that copies zeros into the cells in the gaps: a unit is one cell, in all heads of a tensor."""
        ranges: list[tuple[int, int]] = []
        units: list[tuple[int, int, int, int]] = []
        for tiles in self._tiles:
            first = len(units)
            for block, cells in tiles.inside(unfilled):
                units += [(0, 0, block, cell) for cell in cells]
            ranges.append((first, len(units)))
        unit_rows = np.array(units, dtype=np.int32).reshape(-1, 4)
        return WaveTable(self._pieces, tuple(ranges), unit_rows)


class _WaitingTable:
    """A table that waits for room on the device; `reached` starts it once there is room."""

    def __init__(self, relayout: Relayout, table: WaveTable) -> None:
        self._relayout = relayout
        self._table = table
        self._mark: DeviceMark | None = None

    def reached(self) -> bool:
        if self._mark is None:
            self._mark = self._relayout.try_start(self._table)
        return self._mark is not None and self._mark.reached()


def _element_bytes(tensor: PagedTensor) -> int:
    return tensor.element_bytes or tensor.cell_bytes


def _shape(tensor: PagedTensor) -> Shape:
    """One cell in all heads of a tensor, from zeros; its position in the block is its number."""
    elements = tensor.cell_bytes // _element_bytes(tensor)
    # Strides of the source are 0: every element is copied from the same zeros.
    axes = [
        CopyAxis(len(tensor.heads), 0, tensor.head_stride),
        CopyAxis(elements, 0, tensor.element_stride),
    ]
    unit_stride = (tensor.block_stride, tensor.tile_stride)
    return Shape.from_axes(
        axes, _element_bytes(tensor), destination_unit_stride=unit_stride
    )


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
        memory = (
            torch.empty(0, dtype=torch.uint8).set_(storage.untyped_storage()).numpy()
        )
        offset = tensor.base - memory.ctypes.data
        if 0 <= offset < len(memory):
            return np.ndarray(
                counts, dtype=np.uint8, buffer=memory, offset=offset, strides=strides
            )
    raise ValueError(
        f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations"
    )
