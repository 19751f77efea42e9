"""The prompt of `kvferry plan`: how long it is, and how many units and blocks of it a plan reads.

Its blocks are assumed to be 1, 2, 3, … on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.cli.arguments import InvalidArgument
from kvferry.plan.blocks import first_needed, wanted_slots
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.handshake import CacheGroup

DEFAULT_TOKENS = 8192
MAX_TOKENS = 1 << 22

Groups = Sequence[CacheGroup]


class Units(NamedTuple):
    """A prompt in one token map: the number of units, and of the producer's blocks that hold them."""

    units: int
    blocks: int


def prompt_tokens(
    wanted: int | None, token_maps: Iterable[TokenMap], here: Groups, there: Groups
) -> int:
    """The length of the prompt: `wanted`, or `DEFAULT_TOKENS` but at most the tokens that the smaller cache holds.

    Raises:
        InvalidArgument: `wanted` is more than a cache holds, or a cache holds nothing.
    """
    limits = [(MAX_TOKENS, "this command counts no further")]
    for tokens in token_maps:
        # A state is one page, however long the prompt is.
        if tokens.is_state:
            continue
        for role, side, groups in (
            ("producer", tokens.remote, there),
            ("consumer", tokens.local, here),
        ):
            group = groups[tokens.group]
            # All scheduler blocks but the null block.
            usable_blocks = side.blocks * side.block_tokens // group.block_tokens - 1
            held = usable_blocks * group.block_tokens * side.share.ranks
            limits.append((held, f"the {role}'s cache holds no more"))
    # By number, and then by text: the reason is that of the smallest limit.
    max_tokens, why = min(limits)
    if max_tokens < 1:
        expected = "at least 2 in every cache: block 0 is the null block"
        raise InvalidArgument("blocks", 1, expected)
    if wanted is None:
        return min(DEFAULT_TOKENS, max_tokens)
    if wanted > max_tokens:
        raise InvalidArgument("--tokens", wanted, f"at most {max_tokens}: {why}")
    return wanted


def count_units(tokens: TokenMap, here: Groups, num_tokens: int) -> Units:
    """The units of a prompt of `num_tokens` tokens in one token map."""
    if tokens.is_state:
        return Units(1, 1)
    group = here[tokens.group]
    span = group.block_tokens * tokens.local.share.ranks
    # The consumer has no block for tokens outside its window.
    first_held = first_needed(group, num_tokens) // span * span
    _, remote_slots = wanted_slots(tokens, first_held, num_tokens)
    # A read of whole blocks fetches a block once, however many of its units are needed.
    blocks = np.unique(remote_slots // tokens.remote.block_tokens)
    return Units(len(remote_slots), len(blocks))
