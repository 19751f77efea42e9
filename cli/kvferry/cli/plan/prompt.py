"""The prompt of `kvferry plan`: how long it is, and how many units and blocks of it a plan reads.

Its blocks are paired by the same function as a request's (`pair_units`), and are assumed to be 1, 2, 3, … on both
sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.cli.arguments import InvalidArgument
from kvferry.plan.blocks import NULL_BLOCK, RequestBlocks, first_needed, pair_units
from kvferry.plan.tokens import TokenMap, TokenSide
from kvferry.plan.transfer_plan import TransferPlan
from kvferry.protocol.handshake import CacheGroup

DEFAULT_TOKENS = 8192
MAX_TOKENS = 1 << 22

Groups = Sequence[CacheGroup]


class Units(NamedTuple):
    """A prompt in one token map: the number of units, and of the producer's blocks that hold them."""

    units: int
    blocks: int


def prompt_tokens(
    wanted: int | None, plans: Iterable[TransferPlan], here: Groups, there: Groups
) -> int:
    """The length of the prompt: `wanted`, or `DEFAULT_TOKENS` but at most the tokens that the smaller cache holds.

    Raises:
        InvalidArgument: `wanted` is more than a cache holds, or a cache holds nothing.
    """
    limits = [(MAX_TOKENS, "this command counts no further")]
    for token_map in _token_maps(plans):
        # A state is one page, however long the prompt is.
        if token_map.is_state:
            continue
        remote = _capacity(token_map.remote, there[token_map.group])
        local = _capacity(token_map.local, here[token_map.group])
        limits.append((remote, "the producer's cache holds no more"))
        limits.append((local, "the consumer's cache holds no more"))
    # By number, and then by text: the reason is that of the smallest limit.
    max_tokens, why = min(limits)
    if max_tokens < 1:
        raise InvalidArgument(
            "blocks", 1, "at least 2 in every cache: block 0 is the null block"
        )
    if wanted is None:
        return min(DEFAULT_TOKENS, max_tokens)
    if wanted > max_tokens:
        raise InvalidArgument("--tokens", wanted, f"at most {max_tokens}: {why}")
    return wanted


def _token_maps(plans: Iterable[TransferPlan]) -> set[TokenMap]:
    token_maps: set[TokenMap] = set()
    for plan in plans:
        for route in plan.routes:
            token_maps.update(bundle.tokens for bundle in route.bundles)
    return token_maps


def count_units(
    token_map: TokenMap, here: Groups, there: Groups, num_tokens: int
) -> Units:
    """The units of a prompt of `num_tokens` tokens in one token map."""
    if token_map.is_state:
        return Units(1, 1)
    group = token_map.group
    local_blocks = _assumed_blocks(token_map.local, here[group], num_tokens)
    # Tokens outside the window have no block.
    local_span = here[group].block_tokens * token_map.local.share.ranks
    num_outside = first_needed(here[group], num_tokens) // local_span
    local_blocks[:num_outside] = [NULL_BLOCK] * num_outside
    other_groups: list[list[int]] = [[]] * group
    request = RequestBlocks(
        local=[*other_groups, local_blocks],
        remote=[
            *other_groups,
            _assumed_blocks(token_map.remote, there[group], num_tokens),
        ],
        first_token=0,
        stop_token=num_tokens,
        num_tokens=num_tokens,
    )
    pairs = pair_units(token_map, here[group], there[group], request)
    # A read of whole blocks fetches a block once, however many of its units are needed.
    return Units(len(pairs), len(np.unique(pairs.remote_block)))


def _capacity(side: TokenSide, group: CacheGroup) -> int:
    """Tokens that a cache holds in all blocks except the null block."""
    kernel_blocks = group.block_tokens // side.block_tokens
    usable_blocks = side.blocks // kernel_blocks - 1
    return usable_blocks * group.block_tokens * side.share.ranks


def _assumed_blocks(side: TokenSide, group: CacheGroup, num_tokens: int) -> list[int]:
    """The assumed scheduler blocks of a prompt."""
    num_blocks = -(-num_tokens // (group.block_tokens * side.share.ranks))
    return list(range(1, num_blocks + 1))
