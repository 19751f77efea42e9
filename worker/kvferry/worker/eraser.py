"""The bytes that a load leaves to be zeroed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from kvferry.plan.blocks import RequestBlocks, UnitPairs
from kvferry.plan.tokens import TokenMap, TokenSide, slots_before
from kvferry.protocol.handshake import CacheGroup
from kvferry.worker.caches import KvCaches
from kvferry.worker.cell_stacks import CellStack, stack_cells
from kvferry.worker.device import DeviceMark, clock_for


class Gap(NamedTuple):
    """Local slots `[first, stop)` of one kernel block that hold nothing of the request."""

    group: int
    block: int
    first: int
    stop: int


class TailEraser:
    """Zeroes what a load did not write of the blocks it loaded: behind its last token, and before its window.

    A cell that holds several tokens is a whole: only cells with no loaded token at all are zeroed.
    """

    def __init__(self, caches: KvCaches) -> None:
        self._clock = clock_for(caches.device)
        self._stacks: dict[int, list[CellStack]] = {}
        divisible = [tensor for tensor in caches.tensors if tensor.tiles > 1 and len(tensor.heads)]
        for stack in stack_cells(divisible, caches.storages):
            self._stacks.setdefault(stack.group, []).append(stack)
        # torch would divide the work of a host's cores among threads of its own, which then wait by spinning.
        self._fill = _fill_on_host if caches.device.type == "cpu" else _fill_on_device

    def mark(self) -> DeviceMark:
        """Reached when everything that was launched so far is done."""
        return self._clock.mark()

    def erase(
        self, units: Mapping[TokenMap, UnitPairs], groups: Sequence[CacheGroup], request: RequestBlocks
    ) -> DeviceMark | None:
        """Zero the gaps of a request in every tensor.

        Args:
            units: what was loaded.
            groups: of this engine.

        Returns:
            When it is done; None when there is nothing to zero.
        """
        erased = False
        for gap in gaps(units, groups, request):
            for stack in self._stacks.get(gap.group, ()):
                first, stop = -(-gap.first // stack.tile_tokens), gap.stop // stack.tile_tokens
                if first < stop:
                    self._fill(stack.cells, gap.block, first, stop)
                    erased = True
        return self.mark() if erased else None


def gaps(units: Mapping[TokenMap, UnitPairs], groups: Sequence[CacheGroup], request: RequestBlocks) -> Iterator[Gap]:
    """What loaded blocks hold beside the request.

    What lies before its first token is not the request's to touch, and left alone.
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


def _fill_on_device(cells: torch.Tensor, block: int, first: int, stop: int) -> None:
    cells[:, block, :, first:stop] = 0


def _fill_on_host(cells: torch.Tensor, block: int, first: int, stop: int) -> None:
    cells.numpy()[:, block, :, first:stop] = 0
