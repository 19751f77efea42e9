"""The correspondence of tokens on consumer and producer: units, and the slots of interleaved ranks.

A *unit* is a run of tokens that lies in one block, and in one run of the interleave, on both sides: it can be
copied as a whole, for any two block sizes. With blocks of 16 and 24 tokens a unit has 8: it is in one of two
positions of a block of 16 and in one of three of a block of 24.

`reaches_back` checks that the tokens which a producer holds of a sequence suffice to continue it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvferry.protocol.geometry import Interleave, PagedTensor
from kvferry.protocol.handshake import CacheGroup

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
    def of(cls, tensor: PagedTensor) -> TokenSide:
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
        return 1 if self.is_state else side.block_tokens // self.unit_tokens


def share_of(tensor: PagedTensor) -> Interleave:
    """A tensor's interleave in normal form: with one rank, which holds everything, the run length is ignored."""
    return tensor.interleave if tensor.interleave.ranks > 1 else EVERYTHING


def map_tokens(group: int, policy: str, local: PagedTensor, remote: PagedTensor) -> TokenMap:
    """The token map of two tensors; see the module's docstring for the unit."""
    here, there = TokenSide.of(local), TokenSide.of(remote)
    if policy == "state":
        return TokenMap(group, 0, here, there)
    unit = math.gcd(here.block_tokens, there.block_tokens)
    if here.share != there.share:
        for share in (here.share, there.share):
            unit = math.gcd(unit, share.run_tokens if share.ranks > 1 else 0)
    return TokenMap(group, unit, here, there)


def shares_meet(one: Interleave, other: Interleave) -> bool:
    """Whether any token is in both shares.

    A share is the tokens with `t mod (ranks·run)` in `[rank·run, rank·run + run)`. Two such sets meet if and only
    if the intervals do modulo the gcd of their periods.
    """
    period = math.gcd(one.ranks * one.run_tokens, other.ranks * other.run_tokens)
    gap = (other.rank * other.run_tokens - one.rank * one.run_tokens) % period
    return gap < one.run_tokens or period - gap < other.run_tokens


def shared_part(one: Interleave, other: Interleave) -> float:
    """The fraction of all tokens that is in both shares; estimated if the pattern has more than 2**16 runs."""
    if one == other:
        return 1.0 / one.ranks
    period = math.lcm(one.ranks * one.run_tokens, other.ranks * other.run_tokens)
    step = math.gcd(one.run_tokens, other.run_tokens)
    if period // step > 1 << 16:
        return 1.0 / (one.ranks * other.ranks)
    tokens = np.arange(0, period, step, dtype=np.int64)
    return float((in_share(one, tokens) & in_share(other, tokens)).mean())


def slots_before(share: Interleave, token: int) -> int:
    """The number of tokens in `[0, token)` that are in a share: the local slot of the next one."""
    whole, rest = divmod(token, share.ranks * share.run_tokens)
    return whole * share.run_tokens + min(
        max(rest - share.rank * share.run_tokens, 0), share.run_tokens
    )


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


def held_from(block_span: int, num_blocks: int, num_tokens: int) -> int:
    """The first token of a sequence of `num_tokens` that its last `num_blocks` scheduler blocks hold.

    Args:
        block_span: tokens that one block covers on all ranks together: its local slots × the ranks that the tokens are
            divided among.
    """
    return max(0, -(-num_tokens // block_span) - num_blocks) * block_span


def first_needed(group: CacheGroup, next_token: int) -> int:
    """The first token whose cache is needed to compute `next_token`.

    In a window those are the `window_tokens − 1` before it. In chunked attention it is those of its own chunk, so the
    first token of a chunk needs none.
    """
    if group.policy == "window":
        return max(0, next_token - group.window_tokens + 1)
    if group.policy == "chunk":
        return next_token // group.window_tokens * group.window_tokens
    return 0


def reaches_back(
    group: CacheGroup, block_span: int, first_held: int, num_tokens: int, prompt_tokens: int
) -> bool:
    """Whether an engine can continue a sequence from the tokens `[first_held, num_tokens)` that a producer holds.

    Two things can be missing. If the sequence is the whole prompt, vLLM computes the prompt's last token again for its
    logits: its window begins one token earlier, perhaps in a block that one of the two engines has freed already, and a
    recurrent state already includes it. And the first block that vLLM keeps of the sequence must be complete: vLLM uses
    it as the cache of all of its tokens, also for other prompts with the same prefix. A window of one token needs no
    token before its own, so only the blocks that vLLM keeps must be held.

    Args:
        block_span: tokens of a scheduler block of the engine that continues, see `held_from`.

    Example: window 32, blocks of 16, 47 tokens, blocks of the tokens 16 … 47. To continue with token 47, tokens from 16
    on are needed: enough. To compute token 46 again, tokens from 15 on: not enough. With blocks of 32, neither: the
    first kept block begins at token 0.
    """
    if group.holds_every_token:
        return True
    if group.policy == "state":
        return prompt_tokens > num_tokens
    next_token = num_tokens if prompt_tokens > num_tokens else num_tokens - 1
    needed = range(first_needed(group, next_token), next_token)
    kept = range(first_needed(group, num_tokens) // block_span * block_span, num_tokens)
    return (not kept or first_held <= kept.start) and (not needed or kept.start <= needed.start)
