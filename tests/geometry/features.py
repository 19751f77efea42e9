"""Names of the features that a draw exercises: every feature of the planner must be drawn often enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.plan.transfer_plan import Placing, TransferPlan
from kvferry.protocol.geometry import PagedTensor
from tests.geometry.cells import NULL_BLOCK
from tests.geometry.drawn import Drawn

FEATURES = (
    "tp sizes divide",
    "tp sizes do not divide",
    "tp larger on the producer",
    "tp larger on the consumer",
    "heads do not divide",
    "a worker without heads",
    "replicated heads on the producer",
    "replicated heads on the consumer",
    "replicated heads on both sides",
    "replicas with several readers",
    "producer workers without a reader",
    "pipeline on the producer",
    "pipeline on the consumer",
    "pipelines cut differently",
    "mla",
    "dcp on the producer",
    "dcp on the consumer",
    "dcp on both sides, other sizes or runs",
    "dcp of mla",
    "dcp of heads",
    "pcp on the producer",
    "pcp on the consumer",
    "larger blocks on the producer",
    "larger blocks on the consumer",
    "blocks of which neither divides the other",
    "kernel blocks smaller than scheduler blocks",
    "cells of several tokens",
    "elements apart on the producer",
    "elements apart on the consumer",
    "elements apart on both sides",
    "other stride order",
    "k and v packed on one side only",
    "several groups",
    "window",
    "window with blocks given back",
    "state",
    "state and attention",
    "groups over the same bytes",
    "runs of 2 bytes",
    "direct",
    "staged",
    "everything staged",
    "staged in units",
    "staged in blocks",
    "staged in blocks of all heads",
    "some runs of a unit",
    "some units of a request",
    "tokens that are here already",
    "tokens that are not wanted",
    "a block that is not full",
    "other numbers of blocks",
)


def features(case: Drawn, plans: Sequence[TransferPlan]) -> set[str]:
    """The features of an accepted draw."""
    return {*_ranks(case), *_replicas(case, plans), *_blocks(case), *_bytes(case, plans), *_tokens(case)}


def _ranks(case: Drawn) -> Iterator[str]:
    there, here = (x.description.topology for x in (case.producer, case.consumer))
    if there.tp != here.tp:
        small, large = sorted((there.tp, here.tp))
        yield "tp sizes do not divide" if large % small else "tp sizes divide"
        yield f"tp larger on the {'producer' if there.tp > here.tp else 'consumer'}"
    for name, sizes in (("producer", there), ("consumer", here)):
        for size in ("pp", "pcp", "dcp"):
            if getattr(sizes, size) > 1:
                yield f"{'pipeline' if size == 'pp' else size} on the {name}"
        heads = [kind.heads for group in case.pair.model.groups for kind in group.kinds if kind.heads > 1]
        if any(count % (sizes.tp // sizes.dcp) for count in heads if count > sizes.tp // sizes.dcp):
            yield "heads do not divide"
    if case.pair.producer.shards.stages != case.pair.consumer.shards.stages:
        yield "pipelines cut differently"
    shares = [
        {(x.interleave.ranks, x.interleave.run_tokens) for x in tensors if x.interleave.ranks > 1}
        for tensors in (_tensors(case, "producer"), _tensors(case, "consumer"))
    ]
    if all(shares) and shares[0] != shares[1]:
        yield "dcp on both sides, other sizes or runs"
    for tensor in (*_tensors(case, "producer"), *_tensors(case, "consumer")):
        if tensor.interleave.ranks > 1:
            yield "dcp of mla" if tensor.kind == "mla" else "dcp of heads"


def _replicas(case: Drawn, plans: Sequence[TransferPlan]) -> Iterator[str]:
    sides = []
    for name in ("producer", "consumer"):
        side = getattr(case.pair, name)
        ranks = side.shards.topology.tp // side.shards.topology.dcp
        kinds = [kind for group in case.pair.model.groups for kind in group.kinds if kind.name != "mla"]
        if side.shards.rule != "ceil" and any(kind.heads < ranks for kind in kinds):
            sides.append(name)
            yield f"replicated heads on the {name}"
        if any(
            not len(side.shards.heads(place, kind.heads, group.policy))
            for place in side.shards.places()
            for group in case.pair.model.groups
            for kind in group.kinds
        ):
            yield "a worker without heads"
    if len(sides) == 2:
        yield "replicated heads on both sides"
    routes = [route for plan in plans for route in plan.routes]
    if any(not route.slices for route in routes):
        yield "producer workers without a reader"
    holders: dict[tuple[tuple[str, str], int, int], int] = {}
    for tensor in _tensors(case, "producer"):
        key = (tensor.name, tensor.heads.start, tensor.interleave.rank)
        holders[key] = holders.get(key, 0) + 1
    if max(holders.values()) > 1 and any(route.expected > 1 and route.slices for route in routes):
        yield "replicas with several readers"


def _blocks(case: Drawn) -> Iterator[str]:
    for group, there, here in zip(
        case.pair.model.groups, case.pair.producer.blocks, case.pair.consumer.blocks, strict=True
    ):
        if group.policy == "state":
            continue
        small, large = sorted((there.kernel_tokens, here.kernel_tokens))
        if large % small:
            yield "blocks of which neither divides the other"
        elif small != large:
            yield f"larger blocks on the {'producer' if there.kernel_tokens == large else 'consumer'}"
        if max(there.ratio, here.ratio) > 1:
            yield "kernel blocks smaller than scheduler blocks"
        if there.count * there.ratio != here.count * here.ratio:
            yield "other numbers of blocks"
        if group.tile_tokens > 1:
            yield "cells of several tokens"
        if group.kinds[0].name == "mla":
            yield "mla"
    if len(case.pair.model.groups) > 1:
        yield "several groups"
    if case.pair.producer.overlaid or case.pair.consumer.overlaid:
        yield "groups over the same bytes"


def _bytes(case: Drawn, plans: Sequence[TransferPlan]) -> Iterator[str]:
    slices = [item for plan in plans for route in plan.routes for item in route.slices]
    apart = {(bool(x.remote.element_bytes), bool(x.local.element_bytes)) for x in slices}
    names = {(True, True): "both sides", (True, False): "the producer", (False, True): "the consumer"}
    for key in apart & names.keys():
        yield f"elements apart on {names[key]}"
    if any(0 < x.local.element_bytes != x.remote.element_bytes > 0 for x in slices):
        yield "elements of other sizes"
    if any(_axes(x.local) != _axes(x.remote) for x in slices):
        yield "other stride order"
    if any(item.run_bytes == 2 for item in slices):
        yield "runs of 2 bytes"
    for item in slices:
        yield item.placing.value
    if all(item.placing is Placing.STAGED for item in slices):
        yield "everything staged"
    for source in (source for plan in plans for route in plan.routes for source in route.sources):
        yield f"staged in {source.reading.value}"
    packed = [_packed(_tensors(case, name)) for name in ("producer", "consumer")]
    if any((packed[0] & whole) and (packed[1] - whole) for whole in ({True}, {False})):
        yield "k and v packed on one side only"


def _tokens(case: Drawn) -> Iterator[str]:
    policies = {group.policy for group in case.pair.model.groups}
    if "window" in policies:
        yield "window"
    if "state" in policies:
        yield "state"
        if len(policies) > 1:
            yield "state and attention"
    request = case.request
    for index, group in enumerate(case.pair.model.groups):
        if group.policy == "window" and NULL_BLOCK in request.local[index]:
            yield "window with blocks given back"
    if request.first_token:
        yield "tokens that are here already"
    if request.stop_token < request.num_tokens:
        yield "tokens that are not wanted"
    if any(
        group.policy != "state" and request.stop_token % blocks.kernel_tokens
        for group, blocks in zip(case.pair.model.groups, case.pair.consumer.blocks, strict=True)
    ):
        yield "a block that is not full"


def _tensors(case: Drawn, side: str) -> list[PagedTensor]:
    engine = case.producer if side == "producer" else case.consumer
    return [x for worker in engine.description.workers for x in worker.tensors if len(x.heads)]


def _axes(tensor: PagedTensor) -> list[str]:
    """The axes from the outermost to the innermost, those of one step apart."""
    steps = {"b": (tensor.blocks, tensor.block_stride), "h": (len(tensor.heads), tensor.head_stride)}
    steps["t"] = (tensor.tiles, tensor.tile_stride)
    steps["e"] = (2 if tensor.element_bytes else 1, tensor.element_stride)
    return sorted((axis for axis, (size, _) in steps.items() if size > 1), key=lambda axis: -steps[axis][1])


def _packed(tensors: Sequence[PagedTensor]) -> set[bool]:
    """Whether the V of a token lies right behind its K."""
    keys = {x.layer: x for x in tensors if x.kind == "k"}
    return {
        x.base == keys[x.layer].base + keys[x.layer].cell_bytes for x in tensors if x.kind == "v" and x.layer in keys
    }
