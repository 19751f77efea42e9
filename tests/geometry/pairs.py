"""Random pairs of engines that serve one model, with a request between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.protocol.handshake import (
    CacheGroup,
    EngineDescription,
    LeaseTableAddress,
    ModelFacts,
    WorkerDescription,
)
from tests.geometry.caches import Blocks, Caches, Side, carve
from tests.geometry.cells import Memory
from tests.geometry.models import Model, models
from tests.geometry.orders import orders
from tests.geometry.requests import Lengths, Request, lengths, span_of, with_ids
from tests.geometry.shards import Shards, shards

FACTS = ModelFacts(
    model="drawn",
    fingerprint="weights:drawn",
    dtype="bfloat16",
    cache_dtype="auto",
    quantization="none",
    max_model_tokens=4096,
)

_UNITS = st.sampled_from((1, 2, 4, 8))
_MULTIPLES = st.sampled_from(
    ((1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (1, 3), (4, 1), (1, 4))
)
"""Kernel blocks of both sides in a common unit: 2 and 3 of 8 tokens are 16 and 24."""
_RATIOS = st.sampled_from(((1, 1), (1, 1), (2, 1), (1, 2), (3, 2)))
"""Kernel blocks per scheduler block on both sides."""
_STATE_TOKENS = st.sampled_from((1, 16, 4096))
_EITHER = st.booleans()
_SPARE = st.integers(0, 3)
_SEEDS = st.integers(0, 1 << 16)


@dataclass(frozen=True)
class Pair:
    """A producer and a consumer of one model, and a request between them."""

    model: Model
    producer: Side
    consumer: Side
    request: Request


@dataclass(frozen=True)
class EngineShards:
    """An engine with addresses.

    Attributes:
        caches: per worker.
        addresses: per worker, per allocation.
    """

    description: EngineDescription
    caches: tuple[Caches, ...]
    addresses: tuple[tuple[int, ...], ...]

    def memories(self) -> list[Memory]:
        """Per worker its allocations."""
        return [
            Memory(at, one.sizes)
            for at, one in zip(self.addresses, self.caches, strict=True)
        ]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Any pair. It may be unworkable where cells of several tokens meet token interleave."""
    model = draw(models())
    producer_shards, consumer_shards = draw(shards(model)), draw(shards(model))
    sizes = [
        draw(_block_sizes(group.policy, group.tile_tokens)) for group in model.groups
    ]
    spans = [
        tuple(
            span_of(of, group.policy, kernel * ratio)
            for group, (kernel, ratio) in zip(
                model.groups, [x[which] for x in sizes], strict=True
            )
        )
        for which, of in ((0, consumer_shards), (1, producer_shards))
    ]
    asked = draw(lengths(model, spans[0], spans[1]))
    consumer = draw(
        _sides(
            model, consumer_shards, [x[0] for x in sizes], [x[1] for x in asked.local]
        )
    )
    producer = draw(
        _sides(
            model, producer_shards, [x[1] for x in sizes], [x[1] for x in asked.remote]
        )
    )
    return Pair(
        model, producer, consumer, _request(asked, consumer, producer, draw(_SEEDS))
    )


def _request(asked: Lengths, consumer: Side, producer: Side, seed: int) -> Request:
    counts = [
        tuple(blocks.count for blocks in side.blocks) for side in (consumer, producer)
    ]
    return with_ids(
        asked, counts[0], counts[1], (consumer.overlaid, producer.overlaid), seed
    )


@st.composite
def _block_sizes(
    draw: st.DrawFn, policy: str, tile_tokens: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Kernel block and kernel blocks per scheduler block, of the consumer and of the producer.

    The tokens of a state's block mean nothing, so they are any numbers.
    """
    if policy == "state":
        return (draw(_STATE_TOKENS), 1), (draw(_STATE_TOKENS), 1)
    unit = tile_tokens * draw(_UNITS)
    here, there = draw(_MULTIPLES)
    ratios = draw(_RATIOS)
    return (unit * here, ratios[0]), (unit * there, ratios[1])


@st.composite
def _sides(
    draw: st.DrawFn,
    model: Model,
    of: Shards,
    sizes: Sequence[tuple[int, int]],
    held: Sequence[int],
) -> Side:
    overlaid = len(model.groups) > 1 and draw(_EITHER)
    spare = draw(_SPARE)
    counts = [1 + spare + (sum(held) if overlaid else own) for own in held]
    return Side(
        shards=of,
        blocks=tuple(
            Blocks(kernel, ratio, count)
            for (kernel, ratio), count in zip(sizes, counts, strict=True)
        ),
        orders=tuple(draw(orders(group)) for group in model.groups),
        overlaid=overlaid,
        blocks_first=overlaid and draw(_EITHER),
        one_storage=draw(_EITHER),
        names_empty=draw(_EITHER),
    )


def engine(model: Model, side: Side, engine_id: str) -> EngineShards:
    """The engine with made-up addresses: every worker has an address space of its own, far from the others."""
    caches = tuple(carve(model, side, place) for place in side.shards.places())
    addresses = tuple(
        _addresses(one, (index + 1) << 32) for index, one in enumerate(caches)
    )
    workers = tuple(
        WorkerDescription(
            place=place,
            agent=f"{engine_id}/{place}",
            agent_metadata=b"metadata",
            memory="DRAM",
            device=0,
            lease_table=LeaseTableAddress(address=64, slots=16),
            tensors=one.at(at),
        )
        for place, one, at in zip(side.shards.places(), caches, addresses, strict=True)
    )
    return EngineShards(describe(model, side, engine_id, workers), caches, addresses)


def describe(
    model: Model,
    side: Side,
    engine_id: str,
    workers: tuple[WorkerDescription, ...],
    boot: str = "0" * 32,
) -> EngineDescription:
    """The engine's description."""
    return EngineDescription(
        engine_id=engine_id,
        boot=boot,
        mac_key=b"k" * 32,
        facts=FACTS,
        topology=side.shards.topology,
        groups=cache_groups(model, side),
        workers=workers,
    )


def cache_groups(model: Model, side: Side) -> tuple[CacheGroup, ...]:
    return tuple(
        CacheGroup(
            policy=group.policy,
            block_tokens=blocks.block_tokens,
            window_tokens=group.window_tokens,
        )
        for group, blocks in zip(model.groups, side.blocks, strict=True)
    )


def _addresses(caches: Caches, start: int) -> tuple[int, ...]:
    found = []
    for size in caches.sizes:
        found.append(start)
        start += -(-size // 4096) * 4096 + 4096
    return tuple(found)
