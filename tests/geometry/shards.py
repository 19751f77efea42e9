"""How an engine's ranks share out a model: pipeline stages, heads, tokens, replicas."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from tests.geometry.models import MAX_LAYERS, Model

MAX_WORKERS = 8

# Parallel sizes as often as they are drawn.
_REPLICAS = st.sampled_from((1, 1, 1, 1, 2))
_TOKEN_RANKS = st.sampled_from((1, 1, 1, 1, 2, 2, 3, 4))
_TENSOR_RANKS = st.integers(1, MAX_WORKERS)
_STAGES = st.sampled_from((1, 1, 2, 2, 3))
_RUNS = st.sampled_from((1, 2, 4, 0))
_RULES = st.sampled_from((*("even",) * 4, "ceil", "ceil", "overlap"))
_THREE_OF_FOUR = st.sampled_from((True, True, True, False))
_EDGES = {
    (layers, stages): st.sampled_from(
        [
            (0, *cuts, layers)
            for cuts in itertools.combinations(range(1, layers), stages - 1)
        ]
    )
    for layers, stages in itertools.product(range(1, MAX_LAYERS + 1), repeat=2)
    if stages <= layers
}
"""Where pipeline stages begin and end, by layers and stages."""


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
        ranks, rank = (
            self.topology.tp // self.topology.dcp,
            place.tp // self.topology.dcp,
        )
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
    return (
        Range(start, stop)
        if rule == "even"
        else Range(max(0, start - 1), min(heads, stop + 1))
    )


@st.composite
def shards(draw: st.DrawFn, model: Model) -> Shards:
    """Parallel sizes with at most `MAX_WORKERS` workers."""
    pcp, dcp = draw(_REPLICAS), draw(_TOKEN_RANKS)
    tp = min(MAX_WORKERS // pcp, draw(_TENSOR_RANKS))
    if dcp > 1:
        tp = dcp * max(1, min(MAX_WORKERS // (pcp * dcp), tp // 2))
    pp = min(len(model.layers), MAX_WORKERS // (pcp * tp), draw(_STAGES))
    tile = model.groups[0].tile_tokens
    run = draw(_RUNS) if dcp > 1 else 1
    if tile > 1 and draw(_THREE_OF_FOUR):
        run *= tile
    edges = draw(_EDGES[len(model.layers), pp])
    return Shards(
        topology=Topology(pp=pp, pcp=pcp, tp=tp, dcp=dcp),
        stages=tuple(
            model.layers[start:stop] for start, stop in itertools.pairwise(edges)
        ),
        run_tokens=run,
        rule=draw(_RULES),
    )
