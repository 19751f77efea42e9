"""Small sharded engines: attention, MLA and a Mamba-2 state, over tensor, pipeline and context parallel ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kvferry.protocol.geometry import Format, Interleave, PagedTensor, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, WorkerDescription
from tests.plan.samples import engine, worker

CELL_BYTES = 8
"""K of one head and token; V has as many."""
STATE_HEAD_BYTES = 32
CONV_CELL_BYTES = 6
"""One channel: three elements of two bytes."""
GRANITE = {"conv.x": 16, "conv.B": 8, "conv.C": 8, "ssm": 4}
"""Channels of a convolution state's sub-projections, and heads of the temporal state."""


def split(count: int, ranks: int, rank: int) -> Range:
    """A rank's part: as even as possible, the first ranks one more; where there are more ranks, one each, repeated.

    Example: 5 on 2 ranks: [0, 3) and [3, 5). 2 on 4 ranks: [0, 1), [0, 1), [1, 2), [1, 2).
    """
    if ranks > count:
        return Range(rank * count // ranks, rank * count // ranks + 1)
    size, more = divmod(count, ranks)
    start = rank * size + min(rank, more)
    return Range(start, start + size + (rank < more))


def attention(
    layer: str,
    heads: Range,
    base: int,
    *,
    order: str = "HND",
    blocks: int = 8,
    block_tokens: int = 4,
    group: int = 0,
    share: Interleave | None = None,
) -> list[PagedTensor]:
    """K and V of one layer, packed: a token of a head is 8 bytes of K and 8 of V."""
    held, token = len(heads), 2 * CELL_BYTES
    head_stride, tile_stride = (block_tokens * token, token) if order == "HND" else (token, held * token)
    return [
        PagedTensor(
            layer=layer,
            kind=kind,
            group=group,
            base=base + offset,
            blocks=blocks,
            block_tokens=block_tokens,
            block_stride=held * block_tokens * token,
            heads=heads,
            head_stride=head_stride,
            tile_tokens=1,
            tile_stride=tile_stride,
            cell_bytes=CELL_BYTES,
            interleave=share or Interleave(),
            format=Format(dtype="bfloat16"),
        )
        for kind, offset in (("k", 0), ("v", CELL_BYTES))
    ]


def latent(layer: str, base: int, *, blocks: int = 8, share: Interleave | None = None) -> list[PagedTensor]:
    """MLA: one head of 24 bytes a token, which every rank has."""
    return [
        PagedTensor(
            layer=layer,
            kind="mla",
            group=0,
            base=base,
            blocks=blocks,
            block_tokens=4,
            block_stride=96,
            heads=Range(0, 1),
            head_stride=96,
            tile_tokens=1,
            tile_stride=24,
            cell_bytes=24,
            interleave=share or Interleave(),
            format=Format(dtype="bfloat16"),
        )
    ]


def states(
    layer: str, tp: int, rank: int, base: int, *, group: int = 1, blocks: int = 8, kinds: Mapping[str, int] = GRANITE
) -> list[PagedTensor]:
    """A page of sub-projections, channel by channel, and the temporal state behind them."""
    found: list[tuple[str, Range, int]] = []
    for kind, count in kinds.items():
        found.append((kind, split(count, tp, rank), STATE_HEAD_BYTES if kind == "ssm" else CONV_CELL_BYTES))
    sizes = [len(heads) * cell for _, heads, cell in found]
    return [
        PagedTensor(
            layer=layer,
            kind=kind,
            group=group,
            base=base + offset,
            blocks=blocks,
            block_tokens=16,
            block_stride=sum(sizes),
            heads=heads,
            head_stride=cell,
            tile_tokens=16,
            tile_stride=0,
            cell_bytes=cell,
            format=Format(dtype="float32" if kind == "ssm" else "bfloat16"),
        )
        for (kind, heads, cell), offset in zip(found, itertools.accumulate(sizes, initial=0), strict=False)
    ]


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
    blocks: int = 8,
    block_tokens: int = 4,
    run_tokens: int = 4,
    scheduler_tokens: int = 0,
) -> EngineDescription:
    """An engine of a small model.

    Args:
        stages: layers of every pipeline stage; evenly when empty.
        model: `attention`, `mla`, `hybrid` (each layer has attention and a state of its own), `state`.
        run_tokens: of the token interleave, where `dcp` is above 1.
        scheduler_tokens: tokens of a scheduler block; a kernel block's when 0.
    """
    sizes = stages or [len(split(layers, pp, stage)) for stage in range(pp)]
    cuts = [0, *itertools.accumulate(sizes)]
    workers: list[WorkerDescription] = []
    for stage, (first, stop) in enumerate(itertools.pairwise(cuts)):
        for replica, rank in itertools.product(range(pcp), range(tp)):
            share = Interleave(ranks=dcp, rank=rank % dcp, run_tokens=run_tokens) if dcp > 1 else Interleave()
            base = (len(workers) + 1) << 40
            tensors: list[PagedTensor] = []
            for layer in range(first, stop):
                base += 1 << 24
                if model == "mla":
                    tensors += latent(f"layers.{layer}", base, blocks=blocks, share=share)
                if model in ("attention", "hybrid"):
                    own = split(heads, tp // dcp, rank // dcp)
                    tensors += attention(
                        f"layers.{layer}",
                        own,
                        base,
                        order=order,
                        blocks=blocks,
                        block_tokens=block_tokens,
                        share=share,
                    )
                if model in ("hybrid", "state"):
                    index = 1 if model == "hybrid" else 0
                    tensors += states(f"mixers.{layer}", tp, rank, base + (1 << 20), group=index)
            place = Place(pp=stage, pcp=replica, tp=rank, dcp=rank % dcp)
            workers.append(worker(tensors, place))
    group = CacheGroup(policy="full", block_tokens=scheduler_tokens or block_tokens)
    state = CacheGroup(policy="state", block_tokens=16)
    groups = {"hybrid": (group, state), "state": (state,)}.get(model, (group,))
    topology = Topology(pp=len(cuts) - 1, pcp=pcp, tp=tp, dcp=dcp)
    return engine(workers=workers, engine_id=engine_id, topology=topology, groups=groups)
