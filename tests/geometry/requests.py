"""Random requests: how many tokens, which of them are wanted, and the blocks on both sides."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.plan.blocks import RequestBlocks
from tests.geometry.cells import NULL_BLOCK
from tests.geometry.models import Model
from tests.geometry.shards import Shards

MAX_TOKENS = 72

_EITHER = st.booleans()
_TWO_OF_THREE = st.sampled_from((False, True, True))
_KEPT = st.sampled_from((0, 0, 1, 99))
"""Blocks that are kept beyond those that are needed."""
_STATE_BLOCKS = st.sampled_from(((0, 1), (2, 1), (0, 2), (1, 2)))
"""Leading blocks that are not held, and blocks that are: the last one has the state."""


@dataclass(frozen=True)
class Request:
    """One request between two engines. Block ids are scheduler blocks.

    Attributes:
        local: per group the consumer's blocks from the first token on; null where it holds none.
        remote: per group the producer's last blocks of the sequence.
        num_tokens: what the producer holds.
        first_token, stop_token: what the consumer wants.
    """

    local: tuple[tuple[int, ...], ...]
    remote: tuple[tuple[int, ...], ...]
    first_token: int
    stop_token: int
    num_tokens: int

    @property
    def blocks(self) -> RequestBlocks:
        """As the plan takes it."""
        return RequestBlocks(
            local=self.local,
            remote=self.remote,
            first_token=self.first_token,
            stop_token=self.stop_token,
            num_tokens=self.num_tokens,
        )


@dataclass(frozen=True)
class Lengths:
    """A request before it has block ids: per group how many leading blocks are null or left out, and how many stay.

    Attributes:
        local, remote: per group `(leading, held, nulls)`: blocks that are not held, blocks that are, and whether the
            ones that are not stand in the list as null blocks.
    """

    local: tuple[tuple[int, int, bool], ...]
    remote: tuple[tuple[int, int, bool], ...]
    first_token: int
    stop_token: int
    num_tokens: int


def span_of(shards: Shards, policy: str, block_tokens: int) -> int:
    """Tokens of the whole sequence that a scheduler block covers."""
    return block_tokens * (1 if policy == "state" else shards.topology.dcp)


@st.composite
def lengths(
    draw: st.DrawFn,
    model: Model,
    local_spans: tuple[int, ...],
    remote_spans: tuple[int, ...],
) -> Lengths:
    """A request that can be served: the producer holds what the consumer needs of every group.

    Of a window, the last `window_tokens` tokens are needed; of a state, the state, which is the last block's.
    """
    attention = [
        index for index, group in enumerate(model.groups) if group.policy != "state"
    ]
    only_full = all(group.policy == "full" for group in model.groups)
    most = min(
        MAX_TOKENS,
        3 * max([*(max(local_spans[i], remote_spans[i]) for i in attention), 2]),
    )
    # Long enough for a window to leave blocks behind.
    num_tokens = draw(st.integers(1 if only_full else most // 2, most))
    stop = (
        draw(st.integers(1, num_tokens))
        if only_full and draw(_TWO_OF_THREE)
        else num_tokens
    )
    step = math.lcm(*(local_spans[index] for index in attention)) if attention else 1
    hits = (stop - 1) // step if attention else 0
    first = draw(st.integers(1, hits)) * step if hits and draw(_TWO_OF_THREE) else 0
    local: list[tuple[int, int, bool]] = []
    remote: list[tuple[int, int, bool]] = []
    for index, group in enumerate(model.groups):
        nulls_there = draw(_EITHER)
        if group.policy == "state":
            local.append((*draw(_STATE_BLOCKS), True))
            remote.append((*draw(_STATE_BLOCKS), nulls_there))
            continue
        needed = (
            max(first, num_tokens - group.window_tokens)
            if group.policy == "window"
            else first
        )
        here, there = (
            -(-stop // local_spans[index]),
            -(-num_tokens // remote_spans[index]),
        )
        # An engine may free a window's blocks at any time, and tokens that matched locally need not be described.
        clipped = draw(_KEPT) if group.policy == "window" else here
        leading = max(
            0,
            min(here - 1, (num_tokens - group.window_tokens) // local_spans[index])
            - clipped,
        )
        local.append((leading, here - leading, True))
        left_out = max(0, needed // remote_spans[index] - min(there, draw(_KEPT)))
        remote.append(
            (left_out, there - left_out, nulls_there and group.policy == "window")
        )
    return Lengths(tuple(local), tuple(remote), first, stop, num_tokens)


def with_ids(
    asked: Lengths,
    local_counts: tuple[int, ...],
    remote_counts: tuple[int, ...],
    overlaid: tuple[bool, bool],
    seed: int,
) -> Request:
    """Give every held block an id of its own, in random order; groups that share bytes have disjoint ones."""
    draw = random.Random(seed)
    return Request(
        local=_ids(asked.local, local_counts, overlaid[0], draw),
        remote=_ids(asked.remote, remote_counts, overlaid[1], draw),
        first_token=asked.first_token,
        stop_token=asked.stop_token,
        num_tokens=asked.num_tokens,
    )


def _ids(
    wanted: tuple[tuple[int, int, bool], ...],
    counts: tuple[int, ...],
    overlaid: bool,
    draw: random.Random,
) -> tuple[tuple[int, ...], ...]:
    shared = draw.sample(range(1, counts[0]), counts[0] - 1) if overlaid else []
    found = []
    for (leading, held, nulls), count in zip(wanted, counts, strict=True):
        free = shared if overlaid else draw.sample(range(1, count), count - 1)
        ids = tuple(free.pop() for _ in range(held))
        found.append((NULL_BLOCK,) * (leading if nulls else 0) + ids)
    return tuple(found)
