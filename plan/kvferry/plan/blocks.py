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
        places: int64 `[n, 4]`: the remote kernel block and the position in it, in units, and the local ones.
        first_slot: local slot of the first unit's first token, counted from the request's first; 0 without units.
    """

    # One array, with the columns of a relayout's table: mapped loads copy by it as it is.
    places: np.ndarray
    first_slot: int = 0

    def __len__(self) -> int:
        return len(self.places)

    @property
    def remote_block(self) -> np.ndarray:
        """int64 `[n]`, as the three that follow."""
        return self.places[:, 0]

    @property
    def remote_position(self) -> np.ndarray:
        return self.places[:, 1]

    @property
    def local_block(self) -> np.ndarray:
        return self.places[:, 2]

    @property
    def local_position(self) -> np.ndarray:
        return self.places[:, 3]


_NO_PAIRS = UnitPairs(np.zeros((0, 4), dtype=np.int64))

Wanted = Callable[[CacheGroup], bool]


def pair_request(
    plan: TransferPlan,
    local_groups: Sequence[CacheGroup],
    remote_groups: Sequence[CacheGroup],
    request: RequestBlocks,
    *,
    wanted: Wanted | None = None,
) -> dict[TokenMap, UnitPairs]:
    """Pair the units of a request for every token map of a plan.

    Args:
        wanted: the cache groups; there are no pairs of the others. None for all of them.

    Raises:
        InvalidParams: the ids do not cover what is needed, or leave a cache.
    """
    pairs: dict[TokenMap, UnitPairs] = {}
    for tokens in plan.token_maps:
        local_group = local_groups[tokens.group]
        if wanted is None or wanted(local_group):
            remote_group = remote_groups[tokens.group]
            pairs[tokens] = pair_units(tokens, local_group, remote_group, request)
        else:
            pairs[tokens] = _NO_PAIRS
    return pairs


def pair_units(
    tokens: TokenMap,
    local_group: CacheGroup,
    remote_group: CacheGroup,
    request: RequestBlocks,
) -> UnitPairs:
    """Pair the units that hold the tokens to load; see `RequestBlocks` for the meaning of the ids.

    Units of a window or a chunk that no later token attends to may be absent on the remote side; they are left out.

    Raises:
        InvalidParams: the ids do not cover what is needed, or leave a cache.
    """
    whole_blocks = _pair_whole_blocks(tokens, local_group, remote_group, request)
    if whole_blocks is not None:
        return whole_blocks
    index = tokens.group
    field = f"remote_block_ids[{index}]"
    local_ids = np.asarray(request.local[index], dtype=np.int64)
    remote_ids = np.asarray(request.remote[index], dtype=np.int64)
    if request.stop_token > request.num_tokens:
        expected = f"at most the {request.num_tokens} tokens that are held"
        raise InvalidParams(field, f"tokens up to {request.stop_token}", expected)
    if tokens.is_state:
        return _pair_states(tokens, field, local_ids, remote_ids, request)

    local_slots, remote_slots = _wanted_slots(
        tokens, request.first_token, request.stop_token
    )
    local_index, local_inside = np.divmod(local_slots, local_group.block_tokens)
    if len(local_index) and local_index[-1] >= len(local_ids):
        expected = f"no more than {len(local_ids)} local blocks of {local_group.block_tokens} tokens"
        raise InvalidParams(field, f"tokens up to {request.stop_token}", expected)
    local_blocks = local_ids[local_index]
    # Most requests hold all of their blocks: then nothing is left out, and nothing copied. Small arrays cost by the
    # call, and these were a seventh of a short load.
    if NULL_BLOCK in local_blocks:
        # Null blocks stand where the consumer's own window does not reach.
        is_held = local_blocks != NULL_BLOCK
        local_slots = local_slots[is_held]
        local_inside = local_inside[is_held]
        local_blocks = local_blocks[is_held]
        remote_slots = remote_slots[is_held]

    remote_span = remote_group.block_tokens * tokens.remote.share.ranks
    all_remote_blocks = -(-request.num_tokens // remote_span)
    if len(remote_ids) > all_remote_blocks:
        expected = f"at most {all_remote_blocks} blocks for {request.num_tokens} tokens"
        raise InvalidParams(field, f"{len(remote_ids)} blocks", expected)
    remote_index, remote_inside = np.divmod(remote_slots, remote_group.block_tokens)
    # The remote ids are the last blocks of the sequence. One null block stands for all before them, whose number a
    # client can choose.
    missing = all_remote_blocks - len(remote_ids)
    if missing:
        remote_index = np.maximum(remote_index - (missing - 1), 0)
        remote_ids = np.concatenate([[NULL_BLOCK], remote_ids])
    remote_blocks = remote_ids[remote_index]
    if NULL_BLOCK in remote_blocks:
        is_present = remote_blocks != NULL_BLOCK
        absent = local_slots[~is_present]
        reported = len(request.remote[index])
        _check_left_out(field, tokens, local_group, absent, request, reported)
        local_slots = local_slots[is_present]
        local_inside = local_inside[is_present]
        local_blocks = local_blocks[is_present]
        remote_inside = remote_inside[is_present]
        remote_blocks = remote_blocks[is_present]

    places = np.empty((len(local_slots), 4), dtype=np.int64)
    places[:, 0], places[:, 1] = _kernel_units(
        tokens, tokens.remote, remote_group, remote_blocks, remote_inside
    )
    places[:, 2], places[:, 3] = _kernel_units(
        tokens, tokens.local, local_group, local_blocks, local_inside
    )
    first_slot = 0
    if len(local_slots):
        first_slot = int(local_slots[0])
    pairs = UnitPairs(places, first_slot)
    _check_bounds(field, tokens.remote, remote_group, pairs.remote_block)
    _check_bounds(
        f"local_blocks[{index}]", tokens.local, local_group, pairs.local_block
    )
    return pairs


def _pair_whole_blocks(
    tokens: TokenMap,
    local_group: CacheGroup,
    remote_group: CacheGroup,
    request: RequestBlocks,
) -> UnitPairs | None:
    """The pairs where both sides hold the same tokens in equal blocks, and all blocks are held; None elsewhere.

    Nothing is refused here: what does not fit goes the way of all others.
    """
    # Most pairs of engines are such. Of a short load every array costs 4 µs, whatever it is for, and the general way
    # needs some twenty.
    unit = tokens.unit_tokens
    share = tokens.local.share
    if not unit == local_group.block_tokens == remote_group.block_tokens:
        return None
    if share != tokens.remote.share or request.stop_token > request.num_tokens:
        return None
    first_slot = slots_before(share, request.first_token)
    stop_slot = slots_before(share, request.stop_token)
    first = first_slot // unit
    stop = -(-stop_slot // unit)
    remote_ids = request.remote[tokens.group]
    # The remote ids are the last blocks of the sequence.
    missing = -(-request.num_tokens // (unit * share.ranks)) - len(remote_ids)
    if stop_slot <= first_slot or not 0 <= missing <= first:
        return None
    local = request.local[tokens.group][first:stop]
    remote = remote_ids[first - missing : stop - missing]
    if not len(local) == len(remote) == stop - first:
        return None
    if not _are_held(local, tokens.local) or not _are_held(remote, tokens.remote):
        return None
    places = np.zeros((len(local), 4), dtype=np.int64)
    places[:, 0] = remote
    places[:, 2] = local
    return UnitPairs(places, first * unit)


def _are_held(blocks: Sequence[int], side: TokenSide) -> bool:
    """Whether none is a null block, and all lie in the cache."""
    return min(blocks) > NULL_BLOCK and max(blocks) < side.blocks


def _wanted_slots(
    tokens: TokenMap, first: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """First local and first remote slot of every unit that holds wanted tokens, ascending."""
    local_share = tokens.local.share
    remote_share = tokens.remote.share
    # With equal shares the same tokens are in the same slots, for any interleave. Then a unit may
    # be longer than a run of the interleave, and is found by slots, not by tokens.
    if local_share == remote_share:
        first_slot = slots_before(local_share, first)
        stop_slot = slots_before(local_share, stop)
        slots = _unit_starts(first_slot, stop_slot, tokens.unit_tokens)
        return slots, slots.copy()
    starts = _unit_starts(first, stop, tokens.unit_tokens)
    starts = starts[in_share(local_share, starts) & in_share(remote_share, starts)]
    return slot_of(local_share, starts), slot_of(remote_share, starts)


def _unit_starts(low: int, high: int, unit: int) -> np.ndarray:
    """The starts of the units that overlap `[low, high)`; none for an empty range."""
    if high <= low:
        return np.empty(0, dtype=np.int64)
    return np.arange(low // unit, -(-high // unit), dtype=np.int64) * unit


def _kernel_units(
    tokens: TokenMap,
    side: TokenSide,
    group: CacheGroup,
    ids: np.ndarray,
    inside: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Kernel blocks and positions of units that are `inside` slots into the scheduler blocks `ids`."""
    kernel_blocks = group.block_tokens // side.block_tokens
    if kernel_blocks == 1:
        return ids, inside // tokens.unit_tokens
    kernel_block, rest = np.divmod(inside, side.block_tokens)
    return ids * kernel_blocks + kernel_block, rest // tokens.unit_tokens


def _pair_states(
    tokens: TokenMap,
    field: str,
    local_ids: np.ndarray,
    remote_ids: np.ndarray,
    request: RequestBlocks,
) -> UnitPairs:
    """Pair the state after the last token: the last block of each side."""
    if request.stop_token != request.num_tokens:
        expected = f"all {request.num_tokens} tokens, or none: a recurrent state cannot be divided"
        raise InvalidParams(field, f"tokens up to {request.stop_token}", expected)
    held_local_ids = local_ids[local_ids != NULL_BLOCK]
    held_remote_ids = remote_ids[remote_ids != NULL_BLOCK]
    if not len(held_local_ids) or not len(held_remote_ids):
        raise InvalidParams(
            field,
            f"{len(held_remote_ids)} blocks",
            "a block with the state on both sides",
        )
    local_block = held_local_ids[-1:]
    remote_block = held_remote_ids[-1:]
    _check_state_block(field, tokens.remote, int(remote_block[0]))
    _check_state_block("local_blocks", tokens.local, int(local_block[0]))
    places = np.zeros((1, 4), dtype=np.int64)
    places[0, 0] = remote_block[0]
    places[0, 2] = local_block[0]
    return UnitPairs(places)


def _check_state_block(field: str, side: TokenSide, block: int) -> None:
    if not 0 <= block < side.blocks:
        raise InvalidParams(field, block, f"block ids up to {side.blocks - 1}")


def _check_left_out(
    field: str,
    tokens: TokenMap,
    group: CacheGroup,
    slots: np.ndarray,
    request: RequestBlocks,
    reported: int,
) -> None:
    """Check that absent units are before the window or chunk, where no later token attends to them.

    Args:
        slots: the first local slots of the absent units.
        reported: number of remote ids.
    """
    last_tokens = token_of(tokens.local.share, slots + tokens.unit_tokens - 1)
    needed_from = first_needed(group, request.stop_token)
    if int(last_tokens.max()) >= needed_from:
        first = max(request.first_token, needed_from)
        expected = f"blocks for all tokens from {first} to {request.stop_token}"
        raise InvalidParams(field, f"{reported} blocks", expected)


def _check_bounds(
    field: str, side: TokenSide, group: CacheGroup, blocks: np.ndarray
) -> None:
    """Check kernel blocks, which clients can name; the error names scheduler blocks, as the ids do."""
    if not len(blocks):
        return
    # As unsigned numbers: a negative one is larger than any block.
    largest = int(np.maximum.reduce(blocks.view(np.uint64)))
    if largest >= side.blocks:
        kernel_blocks = group.block_tokens // side.block_tokens
        raise InvalidParams(
            field,
            int(blocks.max()) // kernel_blocks,
            f"block ids up to {side.blocks // kernel_blocks - 1}",
        )
