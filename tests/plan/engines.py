"""Small sharded engines of known sizes: attention, MLA and a Mamba-2 state, over tensor, pipeline and context parallel
ranks. They are those of `tests.geometry`, with one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from kvferry.protocol.geometry import Topology
from kvferry.protocol.handshake import EngineDescription
from tests.geometry.handmade import side
from tests.geometry.models import Group, Kind, Model
from tests.geometry.pairs import engine
from tests.geometry.shards import Shards, split_heads

STATE_HEAD_BYTES = 32
CONV_CELL_BYTES = 6
"""One channel: three elements of two bytes."""
STATES = (
    Kind("conv.x", 16, 3, 2),
    Kind("conv.B", 8, 3, 2),
    Kind("conv.C", 8, 3, 2),
    Kind("ssm", 4, 8, 4),
)


def sharded(
    engine_id: str = "P",
    *,
    tp: int = 1,
    pp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    heads: int = 4,
    layers: int = 2,
    stages: Sequence[int] = (),
    model: str = "attention",
    order: str = "HND",
    block_tokens: int = 4,
    run_tokens: int = 4,
) -> EngineDescription:
    """An engine of a small model: of K and of V, a head and token has 8 bytes, side by side; of a latent, 24.

    Args:
        stages: layers of every pipeline stage; evenly when empty.
        model: `attention`, `mla`, `hybrid` (each layer has attention and a state of its own), `state`.
        run_tokens: of the token interleave, where `dcp` is above 1.
    """
    sizes = stages or [
        len(split_heads(layers, pp, stage, "even")) for stage in range(pp)
    ]
    attention = (
        (Kind("mla", 1, 12, 2),)
        if model == "mla"
        else (Kind("k", heads, 4, 2), Kind("v", heads, 4, 2))
    )
    kept = {"hybrid": ("layers", "mixers"), "state": ("mixers",)}.get(
        model, ("layers",)
    )
    names = {of: tuple(f"{of}.{layer}" for layer in range(sum(sizes))) for of in kept}
    groups = tuple(
        Group("state", 0, of, STATES, 1)
        if name == "mixers"
        else Group("full", 0, of, attention, 1)
        for name, of in names.items()
    )
    cuts = itertools.pairwise([0, *itertools.accumulate(sizes)])
    cut = tuple(
        tuple(name for of in names.values() for name in of[start:stop])
        for start, stop in cuts
    )
    made = Model(tuple(name for of in names.values() for name in of), groups)
    shards = Shards(
        Topology(pp=len(cut), pcp=pcp, tp=tp, dcp=dcp), cut, run_tokens, "even"
    )
    one = replace(side(made, block=block_tokens, layout=order, blocks=8), shards=shards)
    return engine(made, one, engine_id).description
