"""The slots of loaded blocks that hold no token of the request. Pure: tokens and blocks in, slots out.

block 7                              block 9
├────────────┬───────────────────┬───┴───────────┬───────────────┤
│ before the │      loaded       │    loaded     │ after the     │
│ window     │                   │               │ last token    │
└────────────┴───────────────────┴───────────────┴───────────────┘
  a gap, from the request's                        a gap
  first token on
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvferry.plan.blocks import RequestBlocks, UnitPairs
from kvferry.plan.tokens import TokenMap, TokenSide, slots_before
from kvferry.protocol.handshake import CacheGroup

GAPS_PER_GROUP = 2
"""One before the window, one after the last token."""


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
    for group_index, (start, tokens) in _first_loaded_slots(units).items():
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


def _first_loaded_slots(
    units: Mapping[TokenMap, UnitPairs],
) -> dict[int, tuple[int, TokenMap]]:
    """By cache group the first local slot that is loaded, and how its tokens are mapped. States have no slots."""
    first_slots: dict[int, tuple[int, TokenMap]] = {}
    for tokens, pairs in units.items():
        if tokens.is_state or not len(pairs):
            continue
        known = first_slots.get(tokens.group)
        if known is None or pairs.first_slot < known[0]:
            first_slots[tokens.group] = (pairs.first_slot, tokens)
    return first_slots


def _kernel_block(
    slot: int, ids: Sequence[int], group: CacheGroup, side: TokenSide
) -> int:
    """The kernel block of a local slot of a request. A scheduler's block is several of them."""
    scheduler_block, slot_in_block = divmod(slot, group.block_tokens)
    kernel_blocks = group.block_tokens // side.block_tokens
    return ids[scheduler_block] * kernel_blocks + slot_in_block // side.block_tokens
