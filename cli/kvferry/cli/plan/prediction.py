"""Predicted descriptors, bytes and time of a prompt, by pairing its blocks exactly as for a request.

The blocks are assumed to be 1, 2, 3, … on both sides. Merging by NIXL is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.cli.arguments import InvalidArgument
from kvferry.plan.blocks import NULL_BLOCK, RequestBlocks, pair_units
from kvferry.plan.cost import Costs
from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import StagedSource
from kvferry.plan.tokens import TokenMap, TokenSide, first_needed
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.protocol.handshake import CacheGroup

DEFAULT_TOKENS = 8192
MAX_TOKENS = 1 << 22

Groups = Sequence[CacheGroup]


class Units(NamedTuple):
    """A prompt in one token map: the number of units, and of the producer's blocks that hold them."""

    units: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Effort:
    """The cost of reading.

    Attributes:
        num_bytes: bytes needed.
        link_bytes: bytes over the link; more than needed if whole blocks are read for a part of them.
        descriptors: descriptors given to NIXL.
        staged_bytes: bytes that the relayout puts in place afterwards.
    """

    num_bytes: int = 0
    link_bytes: int = 0
    descriptors: int = 0
    staged_bytes: int = 0

    def __add__(self, other: Effort) -> Effort:
        num_bytes, link_bytes = self.num_bytes + other.num_bytes, self.link_bytes + other.link_bytes
        staged_bytes = self.staged_bytes + other.staged_bytes
        return Effort(num_bytes, link_bytes, self.descriptors + other.descriptors, staged_bytes)

    def seconds(self, costs: Costs, link_gb_s: float) -> float:
        """Time over a link, with the known costs of descriptors and of the relayout."""
        descriptors_s = self.descriptors * costs.descriptor_s
        return (
            self.link_bytes / (link_gb_s * 1e9)
            + descriptors_s
            + costs.relayout_s(self.staged_bytes)
        )


def prompt_tokens(
    asked: int | None, plans: Iterable[TransferPlan], here: Groups, there: Groups
) -> int:
    """The length of the prompt: `asked`, or `DEFAULT_TOKENS` but at most the tokens that the smaller cache holds.

    Raises:
        InvalidArgument: `asked` is more than a cache holds, or a cache holds nothing.
    """
    limits = [(MAX_TOKENS, "this command counts no further")]
    for tokens in {
        bundle.tokens for plan in plans for route in plan.routes for bundle in route.bundles
    }:
        if not tokens.is_state:
            group = tokens.group
            limits.append(
                (_capacity(tokens.remote, there[group]), "the producer's cache holds no more")
            )
            limits.append(
                (_capacity(tokens.local, here[group]), "the consumer's cache holds no more")
            )
    most, why = min(limits)
    if most < 1:
        raise InvalidArgument("blocks", 1, "at least 2 in every cache: block 0 is the null block")
    if asked is not None and asked > most:
        raise InvalidArgument("--tokens", asked, f"at most {most}: {why}")
    return min(DEFAULT_TOKENS, most) if asked is None else asked


def count_units(tokens: TokenMap, here: Groups, there: Groups, num_tokens: int) -> Units:
    """The units of a prompt of `num_tokens` tokens in one token map."""
    if tokens.is_state:
        return Units(1, 1)
    group = tokens.group
    local = _ids(tokens.local, here[group], num_tokens)
    span = here[group].block_tokens * tokens.local.share.ranks
    left = first_needed(here[group], num_tokens) // span
    local[:left] = [NULL_BLOCK] * left  # tokens outside the window have no block
    others: list[list[int]] = [[]] * group
    request = RequestBlocks(
        local=[*others, local],
        remote=[*others, _ids(tokens.remote, there[group], num_tokens)],
        first_token=0,
        stop_token=num_tokens,
        num_tokens=num_tokens,
    )
    found = pair_units(tokens, here[group], there[group], request)
    return Units(len(found), len(np.unique(found.remote_block)))


def bundle_effort(route: Route, bundle: Bundle, found: Units) -> Effort:
    """The effort of a bundle; of a staged one without the reads, which are in `source_effort`."""
    num_bytes = found.units * bundle.unit_bytes
    if route.placing_of(bundle) is Placing.STAGED:
        return Effort(num_bytes=num_bytes, staged_bytes=num_bytes)
    return Effort(num_bytes, num_bytes, found.units * bundle.unit_runs)


def source_effort(source: StagedSource, found: Units) -> Effort:
    """The effort of reads into the staging pool: the producer's runs, of units or of whole blocks."""
    times = found.blocks if source.whole_blocks else found.units
    return Effort(
        link_bytes=times * source.bundle.unit_bytes, descriptors=times * source.bundle.unit_runs
    )


def _capacity(side: TokenSide, group: CacheGroup) -> int:
    """Tokens that a cache holds in all blocks except the null block."""
    ratio = group.block_tokens // side.block_tokens
    return (side.blocks // ratio - 1) * group.block_tokens * side.share.ranks


def _ids(side: TokenSide, group: CacheGroup, num_tokens: int) -> list[int]:
    """The assumed scheduler blocks of a prompt."""
    count = -(-num_tokens // (group.block_tokens * side.share.ranks))
    return list(range(1, count + 1))
