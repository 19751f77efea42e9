"""Pairs that are written down instead of drawn, in the words of a command line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from kvferry.protocol.geometry import Topology
from tests.geometry.caches import Blocks, Side
from tests.geometry.cells import NULL_BLOCK
from tests.geometry.models import Group, Kind, Model
from tests.geometry.orders import Order
from tests.geometry.pairs import Pair
from tests.geometry.requests import Request, span_of
from tests.geometry.shards import Shards

LAYOUTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "HND": ("LBHN", {}),
    "NHD": ("LBNH", {}),
    "cross-layer": ("BLHN", {}),
    "K and V apart": ("", {}),
    "cpu": ("LBH", {"k": "EN", "v": "NE"}),
}
"""Axes outside of the kinds, and those inside where they differ by kind; see `tests.geometry.orders`."""


def attention(layers: int = 2, heads: int = 4, size: int = 8, window: int = 0) -> Model:
    """Keys and values in bfloat16."""
    kinds = (Kind("k", heads, size, 2), Kind("v", heads, size, 2))
    return _model([("window" if window else "full", window, layers, kinds)])


def latent(layers: int = 2, size: int = 24) -> Model:
    """One latent that every rank has, as MLA keeps it."""
    return _model([("full", 0, layers, (Kind("mla", 1, size, 2),))])


def hybrid(layers: int = 1, heads: int = 2) -> Model:
    """Attention, a sliding window, and a recurrent state with the sub-projections of its convolution."""
    keys = (Kind("k", heads, 4, 2), Kind("v", heads, 4, 2))
    states = (
        Kind("conv.x", 6, 3, 2),
        Kind("conv.B", 2, 3, 2),
        Kind("conv.C", 2, 3, 2),
        Kind("ssm", 4, 5, 4),
    )
    return _model(
        [
            ("full", 0, layers, keys),
            ("window", 20, layers, keys),
            ("state", 0, layers, states),
        ]
    )


def side(
    model: Model,
    *,
    tp: int = 1,
    pp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    run: int = 1,
    block: int = 16,
    ratio: int = 1,
    layout: str = "HND",
    blocks: int = 16,
    overlaid: bool = False,
) -> Side:
    """One engine. Layers are cut into stages of equal size, the last one has the rest.

    Args:
        run: tokens of a run of the interleave.
        block, ratio: tokens per kernel block, kernel blocks per scheduler block.
        blocks: scheduler blocks.
    """
    size = len(model.layers) // pp
    edges = [*range(0, size * pp, size), len(model.layers)]
    stages = tuple(
        model.layers[start:stop] for start, stop in itertools.pairwise(edges)
    )
    outer, inner = LAYOUTS[layout]
    orders = []
    for group in model.groups:
        states = group.policy == "state"
        axes = "LB" if states else outer
        rest = "".join(axis for axis in "LBHN" if axis not in axes)
        names = {
            kind.name: (rest if states else inner.get(kind.name, rest + "E"))
            for kind in group.kinds
        }
        names = {
            name: axes if "E" in axes else f"{axes}E" for name, axes in names.items()
        }
        orders.append(Order(axes, names, {}, frozenset()))
    kernel = [
        Blocks(1, 1, blocks)
        if group.policy == "state"
        else Blocks(block, ratio, blocks)
        for group in model.groups
    ]
    shards = Shards(Topology(pp=pp, pcp=pcp, tp=tp, dcp=dcp), stages, run, "even")
    return Side(shards, tuple(kernel), tuple(orders), overlaid=overlaid)


def pair(
    model: Model,
    producer: Side,
    consumer: Side,
    *,
    tokens: int,
    first: int = 0,
    stop: int | None = None,
) -> Pair:
    """A request of `tokens` tokens, of which the consumer wants `[first, stop)`; blocks are given out backwards."""
    stop = tokens if stop is None else stop
    local, remote = _ids(model, consumer, stop), _ids(model, producer, tokens)
    return Pair(model, producer, consumer, Request(local, remote, first, stop, tokens))


def _ids(model: Model, of: Side, tokens: int) -> tuple[tuple[int, ...], ...]:
    free = list(range(1, of.blocks[0].count))
    found = []
    for group, blocks in zip(model.groups, of.blocks, strict=True):
        span = span_of(of.shards, group.policy, blocks.block_tokens)
        count = 1 if group.policy == "state" else math.ceil(tokens / span)
        gone = (
            max(0, (tokens - group.window_tokens) // span)
            if group.policy == "window"
            else 0
        )
        ids: Sequence[int] = [free.pop() for _ in range(count - gone)]
        found.append((NULL_BLOCK,) * gone + tuple(ids))
        if not of.overlaid:
            free = list(range(1, blocks.count))
    return tuple(found)


def _model(groups: Sequence[tuple[str, int, int, tuple[Kind, ...]]]) -> Model:
    names = [
        f"layers.{index}" for index in range(sum(layers for _, _, layers, _ in groups))
    ]
    made, at = [], 0
    for policy, window, layers, kinds in groups:
        made.append(Group(policy, window, tuple(names[at : at + layers]), kinds, 1))
        at += layers
    return Model(tuple(names), tuple(made))
