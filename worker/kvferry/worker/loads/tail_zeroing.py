"""Zeroes the bytes of a load's last blocks that no token fills.

Paged tensors are viewed as arrays, as few as possible: tensors of one geometry at equal distances are one array. On a
device, zeroing is one wave of the relayout, from a source of zeros. Its kernel runs on the relayout's own stream, once
everything that the load read is in place. The load is reported only after the kernel's mark, so the engine launches
work that reads the blocks only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from kvferry.plan.blocks import RequestBlocks, UnitPairs
from kvferry.plan.tokens import TokenMap, TokenSide, slots_before
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import DeviceClock, DeviceMark, KvCaches, synchronize
from kvferry.worker.relayout.port import Relayout
from kvferry.worker.relayout.shape import Axis, Shape
from kvferry.worker.relayout.wave_table import WaveTable
from kvferry.worker.staging.buffer import relayout_for


class CellStack(NamedTuple):
    """Paged tensors of one cache group in one allocation that differ only in their base.

    Attributes:
        tile_tokens: tokens per cell.
        cells: uint8 `[tensors, blocks, heads, tiles, elements, element_bytes]`, sharing the caches' memory.
    """

    group: int
    tile_tokens: int
    cells: torch.Tensor


def stack_cells(tensors: Iterable[PagedTensor], storages: Sequence[torch.Tensor]) -> list[CellStack]:
    """All cells of these tensors.

    Raises:
        ValueError: one of them lies in none of the storages.
    """
    alike: dict[tuple[int, ...], dict[int, PagedTensor]] = {}  # once per base: torch writes no overlapping elements
    for tensor in tensors:
        alike.setdefault((_storage_of(tensor, storages), *_geometry(tensor)), {})[tensor.base] = tensor
    return [
        _stack(storages[storage], run)
        for (storage, *_), members in alike.items()
        for run in _evenly_spaced([members[base] for base in sorted(members)])
    ]


def _storage_of(tensor: PagedTensor, storages: Sequence[torch.Tensor]) -> int:
    for index, storage in enumerate(storages):
        whole = storage.untyped_storage()
        if 0 <= tensor.base - whole.data_ptr() < whole.nbytes():
            return index
    raise ValueError(f"{tensor.layer}/{tensor.kind} lies in none of the registered allocations")


def _geometry(tensor: PagedTensor) -> tuple[int, ...]:
    """Everything that determines where a tensor's bytes are, except its base."""
    return (
        tensor.group,
        tensor.blocks,
        tensor.block_stride,
        len(tensor.heads),
        tensor.head_stride,
        tensor.tiles,
        tensor.tile_tokens,
        tensor.tile_stride,
        tensor.cell_bytes,
        tensor.element_bytes,
        tensor.element_stride,
    )


def _evenly_spaced(tensors: Sequence[PagedTensor]) -> Iterator[list[PagedTensor]]:
    """Tensors in ascending order, divided into runs of equal distances."""
    run: list[PagedTensor] = []
    for tensor in tensors:
        if len(run) > 1 and tensor.base - run[-1].base != run[1].base - run[0].base:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _stack(storage: torch.Tensor, run: Sequence[PagedTensor]) -> CellStack:
    first = run[0]
    whole = storage.untyped_storage()
    element = first.element_bytes or first.cell_bytes
    distance = run[1].base - first.base if len(run) > 1 else 0
    shape = (len(run), first.blocks, len(first.heads), first.tiles, first.cell_bytes // element, element)
    strides = (distance, first.block_stride, first.head_stride, first.tile_stride, first.element_stride, 1)
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(whole)
    return CellStack(first.group, first.tile_tokens, flat.as_strided(shape, strides, first.base - whole.data_ptr()))


_WHOLE_BLOCK = 1 << 31
_GAPS_PER_GROUP = 2
"""One before the window, one after the last token."""


class Gap(NamedTuple):
    """Local slots `[first, stop)` of one kernel block that hold nothing of the request."""

    group: int
    block: int
    first: int
    stop: int


class _Cells(NamedTuple):
    """Cells `[first, stop)` of one block, in every tensor and head of a stack."""

    stack: CellStack
    block: int
    first: int
    stop: int


class TailZeroing:
    """Zeroes the parts of loaded blocks that the load did not write: after its last token, and before its window.

    A cell that holds several tokens is not divided: only cells with no loaded token at all are zeroed.
    """

    def __init__(self, caches: KvCaches) -> None:
        self._clock = DeviceClock(caches.device)
        self._stacks: dict[int, list[CellStack]] = {}
        divisible = [tensor for tensor in caches.tensors if tensor.tiles > 1 and len(tensor.heads)]
        stacks = stack_cells(divisible, caches.storages)
        for stack in stacks:
            self._stacks.setdefault(stack.group, []).append(stack)
        self._zeros = torch.zeros(
            max((stack.cells.shape[-1] for stack in stacks), default=1), dtype=torch.uint8, device=caches.device
        )
        self._relayout: Relayout | None = None
        if caches.device.type != "cpu":
            whole_blocks = [Gap(group, 0, 0, _WHOLE_BLOCK) for group in self._stacks for _ in range(_GAPS_PER_GROUP)]
            largest = self._table(self._cells(whole_blocks))
            self._relayout = relayout_for([self._zeros], caches.storages, caches.device, largest)
            synchronize(caches.device)  # the zeros are written on one stream and read on another

    def mark(self) -> DeviceMark:
        """A mark that is reached when everything that `zero` has launched so far is done."""
        return self._relayout.mark() if self._relayout is not None else self._clock.mark()

    def zero(
        self, units: Mapping[TokenMap, UnitPairs], groups: Sequence[CacheGroup], request: RequestBlocks
    ) -> DeviceMark | None:
        """Zero the gaps of a request in every tensor.

        Args:
            units: the loaded units.
            groups: this engine's cache groups.

        Returns:
            A mark that is reached when it is done; None when there is nothing to zero.
        """
        cells = list(self._cells(gaps(units, groups, request)))
        if not cells:
            return None
        if self._relayout is None:
            for stack, block, first, stop in cells:
                # With numpy: torch would divide the work among its own threads, which then spin while they wait.
                stack.cells.numpy()[:, block, :, first:stop] = 0
            return self.mark()
        table = self._table(cells)
        return self._relayout.try_start(table) or _Waiting(self._relayout, table)

    def _cells(self, gaps: Iterable[Gap]) -> Iterator[_Cells]:
        """The whole cells in the gaps."""
        for gap in gaps:
            for stack in self._stacks.get(gap.group, ()):
                first, stop = -(-gap.first // stack.tile_tokens), gap.stop // stack.tile_tokens
                if first < stop:
                    yield _Cells(stack, gap.block, first, min(stop, stack.cells.shape[3]))

    def _table(self, cells: Iterable[_Cells]) -> WaveTable:
        """The table that copies zeros into cells: one piece and one unit for each of them."""
        shapes: dict[Shape, int] = {}
        rows: list[tuple[int, ...]] = []
        units: list[tuple[int, ...]] = []
        for unit, (stack, block, first, stop) in enumerate(cells):
            tensors, _, heads, _, elements, run = stack.cells.shape
            apart, block_stride, head_stride, tile_stride, element_stride, _ = stack.cells.stride()
            axes = [
                Axis(tensors, 0, apart),
                Axis(heads, 0, head_stride),
                Axis(stop - first, 0, tile_stride),
                Axis(elements, 0, element_stride),
            ]
            shape = shapes.setdefault(Shape.of(axes, run, destination_unit_stride=(block_stride, 0)), len(shapes))
            start = stack.cells.data_ptr() + first * tile_stride
            rows.append((self._zeros.data_ptr(), start, shape, unit, unit + 1, 0))
            units.append((0, 0, block, 0))
        return WaveTable.of(tuple(shapes), rows, units)


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


def gaps(units: Mapping[TokenMap, UnitPairs], groups: Sequence[CacheGroup], request: RequestBlocks) -> Iterator[Gap]:
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
            yield Gap(index, _block_of(stop - 1, ids, group, side), stop % side.block_tokens, side.block_tokens)


def _block_of(slot: int, ids: Sequence[int], group: CacheGroup, side: TokenSide) -> int:
    """The kernel block of a local slot of a request."""
    scheduler_block, inside = divmod(slot, group.block_tokens)
    return ids[scheduler_block] * (group.block_tokens // side.block_tokens) + inside // side.block_tokens
