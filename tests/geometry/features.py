"""Names of the features that a draw exercises: every one of these must be drawn often enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.plan.transfer_plan import Placing, TransferPlan
from kvferry.protocol.geometry import PagedTensor
from tests.geometry.cells import NULL_BLOCK
from tests.geometry.drawn import Drawn

FEATURES = (
    "tp sizes do not divide",
    "a producer worker with several readers",
    "producer workers without a reader",
    "pipelines cut differently",
    "dcp on both sides, other sizes or runs",
    "dcp of mla",
    "pcp",
    "blocks of which neither divides the other",
    "kernel blocks smaller than scheduler blocks",
    "cells of several tokens",
    "elements apart on both sides",
    "k and v packed on one side only",
    "window with blocks given back",
    "state and attention",
    "groups over the same bytes",
    "direct",
    "staged",
    "staged in units",
    "staged in blocks",
    "staged in blocks of all heads",
    "some runs of a unit",
    "some units of a request",
    "tokens that are here already",
    "tokens that are not wanted",
)


def features(case: Drawn, plans: Sequence[TransferPlan]) -> set[str]:
    """The features of an accepted draw."""
    return {*_ranks(case, plans), *_blocks(case), *_bytes(case, plans), *_tokens(case)}


def _ranks(case: Drawn, plans: Sequence[TransferPlan]) -> Iterator[str]:
    there, here = (x.description.topology for x in (case.producer, case.consumer))
    if max(there.tp, here.tp) % min(there.tp, here.tp):
        yield "tp sizes do not divide"
    if max(there.pcp, here.pcp) > 1:
        yield "pcp"
    if case.pair.producer.shards.stages != case.pair.consumer.shards.stages:
        yield "pipelines cut differently"
    sides = [
        [x for x in _tensors(case, name) if x.interleave.ranks > 1]
        for name in ("producer", "consumer")
    ]
    shares = [
        {(x.interleave.ranks, x.interleave.run_tokens) for x in side} for side in sides
    ]
    if all(shares) and shares[0] != shares[1]:
        yield "dcp on both sides, other sizes or runs"
    if any(x.kind == "mla" for side in sides for x in side):
        yield "dcp of mla"
    routes = [route for plan in plans for route in plan.routes]
    if any(not route.slices for route in routes):
        yield "producer workers without a reader"
    if any(route.expected > 1 and route.slices for route in routes):
        yield "a producer worker with several readers"


def _blocks(case: Drawn) -> Iterator[str]:
    groups = zip(
        case.pair.model.groups,
        case.pair.producer.blocks,
        case.pair.consumer.blocks,
        strict=True,
    )
    for group, there, here in groups:
        if group.policy == "state":
            continue
        small, large = sorted((there.kernel_tokens, here.kernel_tokens))
        if large % small:
            yield "blocks of which neither divides the other"
        if max(there.ratio, here.ratio) > 1:
            yield "kernel blocks smaller than scheduler blocks"
        if group.tile_tokens > 1:
            yield "cells of several tokens"
    if case.pair.producer.overlaid or case.pair.consumer.overlaid:
        yield "groups over the same bytes"


def _bytes(case: Drawn, plans: Sequence[TransferPlan]) -> Iterator[str]:
    routes = [route for plan in plans for route in plan.routes]
    slices = [item for route in routes for item in route.slices]
    if any(x.remote.element_bytes and x.local.element_bytes for x in slices):
        yield "elements apart on both sides"
    yield from (
        placing.value
        for placing in Placing
        if any(x.placing is placing for x in slices)
    )
    yield from (
        f"staged in {source.reading.value}"
        for route in routes
        for source in route.sources
    )
    packed = [_packed(_tensors(case, name)) for name in ("producer", "consumer")]
    if any((packed[0] & whole) and (packed[1] - whole) for whole in ({True}, {False})):
        yield "k and v packed on one side only"


def _tokens(case: Drawn) -> Iterator[str]:
    request, groups = case.request, case.pair.model.groups
    policies = {group.policy for group in groups}
    if "state" in policies and len(policies) > 1:
        yield "state and attention"
    if any(
        of.policy == "window" and NULL_BLOCK in ids
        for of, ids in zip(groups, request.local, strict=True)
    ):
        yield "window with blocks given back"
    if request.first_token:
        yield "tokens that are here already"
    if request.stop_token < request.num_tokens:
        yield "tokens that are not wanted"


def _tensors(case: Drawn, side: str) -> list[PagedTensor]:
    engine = case.producer if side == "producer" else case.consumer
    return [
        x
        for worker in engine.description.workers
        for x in worker.tensors
        if len(x.heads)
    ]


def _packed(tensors: Sequence[PagedTensor]) -> set[bool]:
    """Whether the V of a token lies right behind its K."""
    keys = {x.layer: x for x in tensors if x.kind == "k"}
    return {
        x.base == keys[x.layer].base + keys[x.layer].cell_bytes
        for x in tensors
        if x.kind == "v" and x.layer in keys
    }
