"""What a prompt costs a plan: bytes, descriptors and time, predicted without an engine.

Bytes and descriptors are those that a request would have: the prompt's blocks are paired by the same function as a
request's (`pair_units`), and are assumed to be 1, 2, 3, … on both sides. Merging by NIXL is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Effort(NamedTuple):
    """The cost of reading.

    Attributes:
        num_bytes: bytes needed.
        link_bytes: bytes over the link; more than needed if whole blocks are read for a part of them.
        descriptors: descriptors given to NIXL.
        relayout_bytes: bytes that the relayout puts in place after they were staged.
        mapped_bytes: bytes that are copied from mapped memory.
    """

    num_bytes: int = 0
    link_bytes: int = 0
    descriptors: int = 0
    relayout_bytes: int = 0
    mapped_bytes: int = 0

    @property
    def of_producer(self) -> Effort:
        """The part that the producer's link has in it."""
        # The relayout is the consumer's work, and so are copies from mapped memory.
        return self._replace(relayout_bytes=0, mapped_bytes=0)


def total(efforts: Iterable[Effort]) -> Effort:
    """All of them together."""
    return Effort(*map(sum, zip(*efforts, strict=True)))


class Predictor:
    """Predicts what one prompt costs a pair of engines.

    Args:
        num_tokens: of the prompt.
        here: the consumer's cache groups.
        there: the producer's.
        costs: known costs of descriptors, of the relayout and of copies from mapped memory.
        link_gb_s: bandwidth of each worker's link, in GB/s.
    """

    def __init__(
        self,
        num_tokens: int,
        here: Groups,
        there: Groups,
        costs: Costs,
        link_gb_s: float,
    ) -> None:
        self._num_tokens = num_tokens
        self._here = here
        self._there = there
        self._costs = costs
        self._link_gb_s = link_gb_s
        # Workers share most token maps, and counting one takes as long as pairing a request.
        self._units: dict[TokenMap, Units] = {}

    def units_of(self, token_map: TokenMap) -> Units:
        """The units of the prompt in a token map."""
        units = self._units.get(token_map)
        if units is None:
            units = count_units(token_map, self._here, self._there, self._num_tokens)
            self._units[token_map] = units
        return units

    def effort_of(self, route: Route) -> Effort:
        """The effort of everything that is read over a route."""
        efforts = [
            bundle_effort(route, bundle, self.units_of(bundle.tokens))
            for bundle in route.bundles
        ]
        efforts += [
            source_effort(source, self.units_of(source.tokens))
            for source in route.sources
        ]
        return total(efforts)

    def milliseconds(self, effort: Effort) -> float:
        """The time of this effort over one link."""
        link_s = effort.link_bytes / (self._link_gb_s * 1e9)
        descriptors_s = effort.descriptors * self._costs.descriptor_s
        relayout_s = self._costs.relayout_s(effort.relayout_bytes)
        copies_s = relayout_s + self._costs.mapped_s(effort.mapped_bytes)
        return round((link_s + descriptors_s + copies_s) * 1000, 3)


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


def bundle_effort(route: Route, bundle: Bundle, units: Units) -> Effort:
    """The effort of a bundle; of a staged one without the reads, which are in `source_effort`."""
    num_bytes = units.units * bundle.unit_bytes
    placing = route.placing_of(bundle)
    if placing is Placing.STAGED:
        return Effort(num_bytes=num_bytes, relayout_bytes=num_bytes)
    if placing is Placing.MAPPED:
        return Effort(num_bytes=num_bytes, mapped_bytes=num_bytes)
    return Effort(
        num_bytes=num_bytes,
        link_bytes=num_bytes,
        descriptors=units.units * bundle.unit_runs,
    )


def source_effort(source: StagedSource, units: Units) -> Effort:
    """The effort of reads into the staging pool: the producer's runs, of units or of whole blocks."""
    times = units.blocks if source.whole_blocks else units.units
    return Effort(
        link_bytes=times * source.bundle.unit_bytes,
        descriptors=times * source.bundle.unit_runs,
    )


def _capacity(side: TokenSide, group: CacheGroup) -> int:
    """Tokens that a cache holds in all blocks except the null block."""
    kernel_blocks = group.block_tokens // side.block_tokens
    usable_blocks = side.blocks // kernel_blocks - 1
    return usable_blocks * group.block_tokens * side.share.ranks


def _assumed_blocks(side: TokenSide, group: CacheGroup, num_tokens: int) -> list[int]:
    """The assumed scheduler blocks of a prompt."""
    num_blocks = -(-num_tokens // (group.block_tokens * side.share.ranks))
    return list(range(1, num_blocks + 1))
