"""The correspondence of tokens on consumer and producer: units, and the slots of interleaved ranks.

A *unit* is a run of tokens that lies in one block, and in one run of the interleave, on both sides: it can be
copied as a whole, for any two block sizes. With blocks of 16 and 24 tokens a unit has 8: it is in one of two
positions of a block of 16 and in one of three of a block of 24.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvferry.protocol.geometry import Interleave, PagedTensor

EVERYTHING = Interleave()
"""The share of a rank that holds every token."""


@dataclass(frozen=True, slots=True)
class TokenSide:
    """One side of a token map.

    Attributes:
        block_tokens: local slots per kernel block.
        blocks: kernel blocks of the cache.
        share: the tokens that are held there.
    """

    block_tokens: int
    blocks: int
    share: Interleave

    @classmethod
    def from_tensor(cls, tensor: PagedTensor) -> TokenSide:
        """The side of a tensor."""
        return cls(tensor.block_tokens, tensor.blocks, share_of(tensor))


@dataclass(frozen=True, slots=True)
class TokenMap:
    """How the tokens of one cache group correspond on two sides.

    Attributes:
        group: the group's index, the same on both sides.
        unit_tokens: tokens of a unit; 0 for a recurrent state, whose only unit is the whole block.
    """

    group: int
    unit_tokens: int
    local: TokenSide
    remote: TokenSide

    @property
    def is_state(self) -> bool:
        return self.unit_tokens == 0

    def positions(self, side: TokenSide) -> int:
        """Units per kernel block of a side."""
        if self.is_state:
            return 1
        return side.block_tokens // self.unit_tokens


def share_of(tensor: PagedTensor) -> Interleave:
    """A tensor's interleave in normal form: with one rank, which holds everything, the run length is ignored."""
    if tensor.interleave.ranks > 1:
        return tensor.interleave
    return EVERYTHING


def map_tokens(
    group: int, policy: str, local: PagedTensor, remote: PagedTensor
) -> TokenMap:
    """The token map of two tensors; see the module's docstring for the unit."""
    local_side = TokenSide.from_tensor(local)
    remote_side = TokenSide.from_tensor(remote)
    # A state has seen all tokens before it, so it is no state of a part of them.
    if policy == "state":
        return TokenMap(group, 0, local_side, remote_side)
    unit = math.gcd(local_side.block_tokens, remote_side.block_tokens)
    # With equal shares the runs of the interleave do not matter: the same tokens are in the same
    # slots.
    if local_side.share != remote_side.share:
        for share in (local_side.share, remote_side.share):
            if share.ranks > 1:
                unit = math.gcd(unit, share.run_tokens)
    return TokenMap(group, unit, local_side, remote_side)


def shares_meet(share: Interleave, other: Interleave) -> bool:
    """True if any token is in both shares."""
    # A share is the tokens with `t mod (ranks·run)` in `[rank·run, rank·run + run)`. Two such sets
    # meet if and only if the intervals do modulo the gcd of their periods.
    period = math.gcd(share.ranks * share.run_tokens, other.ranks * other.run_tokens)
    gap = (other.rank * other.run_tokens - share.rank * share.run_tokens) % period
    return gap < share.run_tokens or period - gap < other.run_tokens


def shared_part(share: Interleave, other: Interleave) -> float:
    """The fraction of all tokens that is in both shares; estimated if the pattern has more than 2**16 runs."""
    if share == other:
        return 1.0 / share.ranks
    period = math.lcm(share.ranks * share.run_tokens, other.ranks * other.run_tokens)
    step = math.gcd(share.run_tokens, other.run_tokens)
    # Descriptions are input, and a pattern may be as long as two of their numbers multiplied. The figure is for
    # people: no read depends on it.
    if period // step > 1 << 16:
        return 1.0 / (share.ranks * other.ranks)
    tokens = np.arange(0, period, step, dtype=np.int64)
    return float((in_share(share, tokens) & in_share(other, tokens)).mean())


def slot_of(share: Interleave, tokens: np.ndarray) -> np.ndarray:
    """The local slots of tokens that are in a share: `(t div (I·S))·I + t mod I`."""
    run = share.run_tokens
    return np.asarray(tokens // (run * share.ranks) * run + tokens % run)


def token_of(share: Interleave, slots: np.ndarray) -> np.ndarray:
    """The tokens in local slots: the inverse of `slot_of`."""
    run = share.run_tokens
    return np.asarray((slots // run * share.ranks + share.rank) * run + slots % run)


def in_share(share: Interleave, tokens: np.ndarray) -> np.ndarray:
    """Mask of the tokens that are in a share, bool."""
    return np.asarray(tokens // share.run_tokens % share.ranks == share.rank)
