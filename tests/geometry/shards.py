"""How an engine's ranks share out a model: pipeline stages, heads, tokens, replicas."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from tests.geometry.models import Model

MAX_WORKERS = 8

_TOKEN_RANKS = (1, 1, 1, 1, 1, 2, 2, 3, 4)
"""Decode context parallel sizes as often as they are drawn."""


@dataclass(frozen=True)
class Shards:
    """An engine's parallel sizes and what follows from them.

    Attributes:
        stages: the layers of every pipeline stage.
        run_tokens: of the token interleave; 0 stands for a whole block of the group.
        rule: how heads that do not divide are shared out, see `split_heads`.
    """

    topology: Topology
    stages: tuple[tuple[str, ...], ...]
    run_tokens: int
    rule: str

    def places(self) -> list[Place]:
        sizes = self.topology
        return [
            Place(pp=stage, pcp=replica, tp=rank, dcp=rank % sizes.dcp)
            for stage in range(sizes.pp)
            for replica in range(sizes.pcp)
            for rank in range(sizes.tp)
        ]

    def heads(self, place: Place, heads: int, policy: str) -> Range:
        """The heads of a worker. Ranks that share a token range out among them have the same ones."""
        if policy == "state":
            return split_heads(heads, self.topology.tp, place.tp, self.rule)
        ranks, rank = self.topology.tp // self.topology.dcp, place.tp // self.topology.dcp
        return split_heads(heads, ranks, rank, self.rule)

    def interleave(self, place: Place, policy: str, block_tokens: int) -> Interleave:
        """Runs divide the scheduler's block: otherwise a rank could need more blocks than the scheduler counts."""
        if policy == "state" or self.topology.dcp == 1:
            return Interleave()
        run = math.gcd(self.run_tokens, block_tokens)
        return Interleave(ranks=self.topology.dcp, rank=place.dcp, run_tokens=run)


def split_heads(heads: int, ranks: int, rank: int, rule: str) -> Range:
    """The heads of a rank.

    - `even`: as even as they divide, the first ranks have more; with fewer heads than ranks, each head is on several.
    - `ceil`: every rank has the same number, the last ones fewer or none.
    - `overlap`: as `even`, and one more on either side: heads at the borders are on two ranks.

    Example: 5 heads on 2 ranks: [0, 3) and [3, 5). 2 heads on 3 ranks: `even` [0, 1), [0, 1), [1, 2); `ceil` [0, 1),
    [1, 2), [2, 2).
    """
    if rule == "ceil":
        size = -(-heads // ranks)
        return Range(min(rank * size, heads), min((rank + 1) * size, heads))
    if heads < ranks:
        return Range(rank * heads // ranks, rank * heads // ranks + 1)
    size, more = divmod(heads, ranks)
    start = rank * size + min(rank, more)
    stop = start + size + (rank < more)
    return Range(start, stop) if rule == "even" else Range(max(0, start - 1), min(heads, stop + 1))


@st.composite
def shards(draw: st.DrawFn, model: Model) -> Shards:
    """Parallel sizes with at most `MAX_WORKERS` workers."""
    dcp = draw(st.sampled_from(_TOKEN_RANKS))
    tp = dcp * draw(st.integers(1, min(3, MAX_WORKERS // dcp))) if dcp > 1 else draw(st.integers(1, 8))
    most = min(len(model.layers), MAX_WORKERS // tp)
    pp = min(most, draw(st.sampled_from((1, 1, 2, 2, 3))))
    pcp = min(MAX_WORKERS // (tp * pp), draw(st.sampled_from((1, 1, 1, 2))))
    tile = model.groups[0].tile_tokens
    run = draw(st.sampled_from((1, 2, 4, 0))) if dcp > 1 else 1
    if tile > 1 and draw(st.sampled_from((True, True, True, False))):
        run *= tile
    cuts = sorted(draw(st.permutations(range(1, len(model.layers))))[: pp - 1]) if pp > 1 else []
    edges = [0, *cuts, len(model.layers)]
    return Shards(
        topology=Topology(pp=pp, pcp=pcp, tp=tp, dcp=dcp),
        stages=tuple(model.layers[start:stop] for start, stop in itertools.pairwise(edges)),
        run_tokens=run,
        rule=draw(st.sampled_from(("even", "even", "even", "even", "ceil", "overlap"))),
    )
