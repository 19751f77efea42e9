"""Elementary copies of one request, whole engines at a time, applied to bytes that name what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.planner import plan_engine
from kvferry.plan.transfer_plan import Placing
from kvferry.protocol.geometry import PagedTensor
from kvferry.protocol.handshake import CacheGroup, EngineDescription
from tests.plan.engines import sharded
from tests.plan.samples import cell_bytes

Content = tuple[str, str, int, int, int]
"""Layer, kind, global head, token, byte: what a byte of a cache is. A state's token is 0."""


Blocks = Sequence[Sequence[int]]
"""A request's scheduler blocks, one list per cache group."""


def content(tensor: PagedTensor, group: CacheGroup, ids: Sequence[int], tokens: int) -> Mapping[int, Content]:
    """Address → what is there, for a request of so many tokens."""
    share = tensor.interleave
    held = {0: (ids[-1], 0)}
    if group.policy != "state":
        own = [token for token in range(tokens) if token // share.run_tokens % share.ranks == share.rank]
        held = {}
        for slot, token in enumerate(own):
            number, inside = divmod(slot, group.block_tokens)
            kernel, tile = divmod(inside, tensor.block_tokens)
            held[token] = (ids[number] * (group.block_tokens // tensor.block_tokens) + kernel, tile)
    return {
        address: (tensor.layer, tensor.kind, head, token, byte)
        for token, (block, tile) in held.items()
        for head in range(tensor.heads.start, tensor.heads.stop)
        for byte, address in enumerate(cell_bytes(tensor, block, head - tensor.heads.start, tile))
    }


def memory_of(engine: EngineDescription, worker: int, blocks: Blocks, tokens: int) -> dict[int, Content]:
    found: dict[int, Content] = {}
    for tensor in engine.workers[worker].tensors:
        found.update(content(tensor, engine.groups[tensor.group], blocks[tensor.group], tokens))
    return found


def blocks_of(engine: EngineDescription, first: int, tokens: int) -> Blocks:
    """Every second block from `first` on."""
    found = []
    for group in engine.groups:
        count = 1 if group.policy == "state" else -(-tokens // (group.block_tokens * engine.topology.dcp))
        found.append([first + 2 * number for number in range(count)])
    return found


def check(
    consumer: EngineDescription, producer: EngineDescription, tokens: int, costs: Costs = PUBLISHED
) -> set[Placing]:
    """Apply the copies of every worker and compare with what it needs; returns how things were placed."""
    local, remote = blocks_of(consumer, 1, tokens), blocks_of(producer, 2, tokens)
    request = RequestBlocks(local, remote, 0, tokens, tokens)
    there = [memory_of(producer, index, remote, tokens) for index in range(len(producer.workers))]
    placings = set()
    for plan in plan_engine(consumer, producer, costs):
        units = pair_request(plan, consumer.groups, producer.groups, request)
        arrived: dict[int, Content] = {}
        for route in plan.routes:
            for copies in route_copies(route, units):
                placings.add(copies.placing)
                triples = zip(copies.src.tolist(), copies.dst.tolist(), copies.num_bytes.tolist(), strict=True)
                for src, dst, length in triples:
                    for byte in range(length):
                        assert dst + byte not in arrived, "written twice"
                        if src + byte in there[route.worker]:  # what a unit has behind the last token is anything
                            arrived[dst + byte] = there[route.worker][src + byte]
        wanted = memory_of(consumer, plan.worker, local, tokens)
        assert {address: arrived.get(address) for address in wanted} == wanted
    return placings


SCENES: dict[str, Callable[[], tuple[EngineDescription, EngineDescription]]] = {
    "equal": lambda: (sharded("D"), sharded()),
    "TP 1 from 2": lambda: (sharded("D"), sharded(tp=2)),
    "TP 2 from 1": lambda: (sharded("D", tp=2), sharded()),
    "TP 3 from 2, 5 heads": lambda: (sharded("D", tp=3, heads=5), sharded(tp=2, heads=5)),
    "TP 2 from 8, 2 heads": lambda: (sharded("D", tp=2, heads=2), sharded(tp=8, heads=2)),
    "tokens outermost from heads outermost": lambda: (sharded("D", order="NHD"), sharded()),
    "blocks of 6 from 4": lambda: (sharded("D", block_tokens=6), sharded()),
    "blocks of 2 from 8": lambda: (sharded("D", block_tokens=2, blocks=16), sharded(block_tokens=8)),
    "scheduler blocks of 8 from 4": lambda: (sharded("D", scheduler_tokens=8, blocks=32), sharded()),
    "stages 1+3 from 2+2": lambda: (sharded("D", stages=(1, 3)), sharded(stages=(2, 2))),
    "MLA, TP 2 from 4": lambda: (sharded("D", tp=2, model="mla"), sharded(tp=4, model="mla")),
    "DCP 1 from 2": lambda: (sharded("D", model="mla"), sharded(tp=2, dcp=2, model="mla")),
    "DCP 4 from 2, heads": lambda: (sharded("D", tp=4, dcp=4, run_tokens=2), sharded(tp=4, dcp=2)),
    "states, TP 2 from 4": lambda: (sharded("D", tp=2, model="hybrid"), sharded(tp=4, model="hybrid")),
    "states, TP 4 from 2": lambda: (
        sharded("D", tp=4, heads=2, model="hybrid"),
        sharded(tp=2, heads=2, model="hybrid"),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("tokens", [1, 8, 11])
def test_every_worker_receives_exactly_what_it_needs(scene: str, tokens: int) -> None:
    check(*SCENES[scene](), tokens)


def test_staged_copies_are_shown_as_their_final_effect() -> None:
    """The same bytes in the same places, whether they go through the staging pool or not."""
    pair = sharded("D", order="NHD"), sharded()
    cheap = Costs(relayout_gb_s=1e9)
    assert check(*pair, 11, cheap) == {Placing.STAGED}
    assert check(*pair, 11, Costs(staged_run_bytes=0)) == {Placing.DIRECT}


def test_a_partial_request_copies_only_its_units() -> None:
    consumer, producer = sharded("D", layers=1), sharded(layers=1)
    (plan,) = plan_engine(consumer, producer)
    request = RequestBlocks([[1, 3, 5]], [[2, 4, 6]], 4, 8, 12)
    (copies,) = route_copies(plan.routes[0], pair_request(plan, consumer.groups, producer.groups, request))
    here, there = consumer.workers[0].tensors[0], producer.workers[0].tensors[0]
    assert copies.num_bytes.tolist() == [256]
    assert copies.dst.tolist() == [here.base + 3 * 256]
    assert copies.src.tolist() == [there.base + 4 * 256]
