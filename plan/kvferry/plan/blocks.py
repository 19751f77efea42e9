"""Pairs of producer and consumer units, for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.plan.tokens import (
    TokenMap,
    TokenSide,
    first_needed,
    in_share,
    slot_of,
    slots_before,
    token_of,
)
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.errors import InvalidParams
from kvferry.protocol.handshake import CacheGroup

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that a request does not hold, e.g. those that left its window."""


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """One request's blocks on both sides, per cache group, as scheduler blocks.

    Attributes:
        local: blocks from the request's first token on; null blocks where none is held.
        remote: the last blocks of the sequence.
        first_token, stop_token: the tokens to load, `[first, stop)`.
        num_tokens: tokens that the remote blocks hold.
    """

    local: Sequence[Sequence[int]]
    remote: Sequence[Sequence[int]]
    first_token: int
    stop_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class UnitPairs:
    """Pairs of local and remote units, in ascending order of local slots.

    Attributes:
        local_block, remote_block: kernel blocks, int64 `[n]`.
        local_position, remote_position: positions in them, int64 `[n]`.
        first_slot: local slot of the first unit's first token, counted from the request's first; 0 without units.
    """

    local_block: np.ndarray
    local_position: np.ndarray
    remote_block: np.ndarray
    remote_position: np.ndarray
    first_slot: int = 0

    def __len__(self) -> int:
        return len(self.local_block)


_NO_PAIRS = UnitPairs(*np.zeros((4, 0), dtype=np.int64))

Wanted = Callable[[CacheGroup], bool]


def every(_: CacheGroup) -> bool:
    """All cache groups are wanted."""
    return True


def pair_request(
    plan: TransferPlan,
    local_groups: Sequence[CacheGroup],
    remote_groups: Sequence[CacheGroup],
    request: RequestBlocks,
    *,
    wanted: Wanted = every,
) -> dict[TokenMap, UnitPairs]:
    """Pair the units of a request for every token map of a plan.

    Args:
        wanted: the cache groups; there are no pairs of the others.

    Raises:
        InvalidParams: the ids do not cover what is needed, or leave a cache.
    """
    pairs: dict[TokenMap, UnitPairs] = {}
    for route in plan.routes:
        for bundle in route.bundles:
            tokens = bundle.tokens
            if tokens in pairs:
                continue
            here, there = local_groups[tokens.group], remote_groups[tokens.group]
            pairs[tokens] = pair_units(tokens, here, there, request) if wanted(here) else _NO_PAIRS
    return pairs


def pair_units(
    tokens: TokenMap, here: CacheGroup, there: CacheGroup, request: RequestBlocks
) -> UnitPairs:
    """Pair the units that hold the tokens to load; see `RequestBlocks` for the meaning of the ids.

    Units of a window or a chunk that no later token attends to may be absent on the remote side; they are left out.

    Raises:
        InvalidParams: the ids do not cover what is needed, or leave a cache.
    """
    index = tokens.group
    field = f"remote_block_ids[{index}]"
    local_ids = np.asarray(request.local[index], dtype=np.int64)
    remote_ids = np.asarray(request.remote[index], dtype=np.int64)
    if request.stop_token > request.num_tokens:
        text = f"at most the {request.num_tokens} tokens that are held"
        raise InvalidParams(field, f"tokens up to {request.stop_token}", text)
    if tokens.is_state:
        return _pair_states(tokens, field, local_ids, remote_ids, request)
    slots_here, slots_there = _wanted_slots(tokens, request.first_token, request.stop_token)
    block, inside = np.divmod(slots_here, here.block_tokens)
    if len(block) and block[-1] >= len(local_ids):
        text = f"no more than {len(local_ids)} local blocks of {here.block_tokens} tokens"
        raise InvalidParams(field, f"tokens up to {request.stop_token}", text)
    held = local_ids[block] != NULL_BLOCK
    slots_here, slots_there, block, inside = (
        array[held] for array in (slots_here, slots_there, block, inside)
    )
    total = -(-request.num_tokens // (there.block_tokens * tokens.remote.share.ranks))
    if len(remote_ids) > total:
        text = f"at most {total} blocks for {request.num_tokens} tokens"
        raise InvalidParams(field, f"{len(remote_ids)} blocks", text)
    source, inside_source = np.divmod(slots_there, there.block_tokens)
    source -= total - len(remote_ids)
    found = source >= 0
    found[found] = remote_ids[source[found]] != NULL_BLOCK
    if not found.all():
        _check_left_out(field, tokens, here, slots_here[~found], request, len(remote_ids))
        slots_here = slots_here[found]
        block, inside, source, inside_source = (
            array[found] for array in (block, inside, source, inside_source)
        )
    local = _kernel_units(tokens, tokens.local, here, local_ids[block], inside)
    remote = _kernel_units(tokens, tokens.remote, there, remote_ids[source], inside_source)
    _check_bounds(field, tokens.remote, there, remote[0])
    _check_bounds(f"local_blocks[{index}]", tokens.local, here, local[0])
    return UnitPairs(*local, *remote, first_slot=int(slots_here[0]) if len(slots_here) else 0)


def _wanted_slots(tokens: TokenMap, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """First local and first remote slot of every unit that holds wanted tokens, ascending."""
    unit, here, there = tokens.unit_tokens, tokens.local.share, tokens.remote.share
    if here == there:  # the same tokens in the same slots, for any interleave
        low, high = slots_before(here, first), slots_before(here, stop)
        slots = _unit_starts(low, high, unit)
        return slots, slots.copy()
    starts = _unit_starts(first, stop, unit)
    starts = starts[in_share(here, starts) & in_share(there, starts)]
    return slot_of(here, starts), slot_of(there, starts)


def _unit_starts(low: int, high: int, unit: int) -> np.ndarray:
    """The starts of the units that overlap `[low, high)`; none for an empty range."""
    stop = -(-high // unit) if high > low else low // unit
    return np.arange(low // unit, stop, dtype=np.int64) * unit


def _kernel_units(
    tokens: TokenMap, side: TokenSide, group: CacheGroup, ids: np.ndarray, inside: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Kernel blocks and positions of units that are `inside` slots into the scheduler blocks `ids`."""
    ratio = group.block_tokens // side.block_tokens
    kernel, rest = np.divmod(inside, side.block_tokens)
    return ids * ratio + kernel, rest // tokens.unit_tokens


def _pair_states(
    tokens: TokenMap,
    field: str,
    local_ids: np.ndarray,
    remote_ids: np.ndarray,
    request: RequestBlocks,
) -> UnitPairs:
    """Pair the state after the last token: the last block of each side."""
    if request.stop_token != request.num_tokens:
        text = f"all {request.num_tokens} tokens, or none: a recurrent state cannot be divided"
        raise InvalidParams(field, f"tokens up to {request.stop_token}", text)
    local_ids, remote_ids = local_ids[local_ids != NULL_BLOCK], remote_ids[remote_ids != NULL_BLOCK]
    if not len(local_ids) or not len(remote_ids):
        raise InvalidParams(
            field, f"{len(remote_ids)} blocks", "a block with the state on both sides"
        )
    for name, ids, side in (
        (field, remote_ids, tokens.remote),
        ("local_blocks", local_ids, tokens.local),
    ):
        if not 0 <= ids[-1] < side.blocks:
            raise InvalidParams(name, int(ids[-1]), f"block ids up to {side.blocks - 1}")
    zero = np.zeros(1, dtype=np.int64)
    return UnitPairs(local_ids[-1:], zero, remote_ids[-1:], zero)


def _check_left_out(
    field: str,
    tokens: TokenMap,
    here: CacheGroup,
    slots: np.ndarray,
    request: RequestBlocks,
    reported: int,
) -> None:
    """Check that absent units are before the window or chunk, where no later token attends to them."""
    last = token_of(tokens.local.share, slots + tokens.unit_tokens - 1)
    needed_from = first_needed(here, request.stop_token)
    if int(last.max()) >= needed_from:
        text = f"blocks for all tokens from {max(request.first_token, needed_from)} to {request.stop_token}"
        raise InvalidParams(field, f"{reported} blocks", text)


def _check_bounds(field: str, side: TokenSide, group: CacheGroup, blocks: np.ndarray) -> None:
    if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < side.blocks:
        ratio = group.block_tokens // side.block_tokens
        raise InvalidParams(
            field, int(blocks.max()) // ratio, f"block ids up to {side.blocks // ratio - 1}"
        )
